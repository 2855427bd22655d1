//! The end of a run: what was captured is sealed, QEMU is ended or left to itself.

use super::{DONE, End, Engine, FAILED, Failure, Inbox, OnExit, Outcome, StoreSink, WARNED};

impl Engine<'_> {
    /// What was captured is sealed before the run ends.
    fn seal_the_rest(&mut self) -> Result<(), Failure> {
        let sink = self.end_encoding()?;
        sink.finish().map(drop).map_err(|e| Failure::store(&e, self.store.path()))
    }

    /// Ends the encoder and takes in its last reports.
    pub(super) fn end_encoding(&mut self) -> Result<StoreSink, Failure> {
        let encoding = self.encoding.take().ok_or_else(|| Failure::new("the encoder has ended"))?;
        let sink = encoding.finish()?;
        let mut requests = Vec::new();
        while let Ok(message) = self.inbox.try_recv() {
            match message {
                Inbox::Report(report) => self.settle(*report),
                request @ Inbox::Request(_) => requests.push(request),
            }
        }
        // For the loop, where it goes on with another encoder; where it does not, who asked is told
        // that the engine has ended.
        for request in requests {
            let _ = self.inbox_sender.send(request);
        }
        Ok(sink)
    }

    pub(super) fn finish(mut self, end: Result<End, Failure>) -> Outcome {
        keyframe_kernel::priority::lower();
        let finished = self.seal_the_rest();
        self.recorder = None;
        let mut run_dir = self.run_dir;
        // The tracker goes with the cycle: QEMU is on its own again before it is ended or left.
        drop(self.copying);
        let (is_attached, is_group) = (self.machines.is_attached(), self.machines.is_group());
        if let Some((disks, vms)) = self.machines.storage() {
            disks.detach(vms);
        }
        let (vms, beside) = self.machines.into_vms();
        let quiet = self.options.quiet;
        let say = |text: &str| {
            if !quiet {
                eprintln!("keyframe: {text}");
            }
        };
        if let Some(recompressor) = self.recompressor.take() {
            recompressor.finish(&say);
        }
        if let (true, Some(count)) =
            (self.given_up, self.options.count.filter(|n| *n > self.sealed))
        {
            eprintln!(
                "keyframe: the {count} checkpoints of --count cannot be reached: {} are sealed",
                self.sealed
            );
        }
        let end = end?;
        let keeps = matches!(end, End::Asked(OnExit::Keep));
        let code = match end {
            End::Vm(exit) if exit.success() => {
                // Its console is somebody else's.
                if is_attached {
                    say(&format!("VM {} has ended", self.name));
                }
                DONE
            }
            End::Vm(exit) => {
                eprintln!("keyframe: QEMU ended with {exit}");
                FAILED
            }
            End::Asked(_) if is_attached => {
                for (name, vm) in vms {
                    say(&format!(
                        "detached: VM {name} runs on without checkpoints (QEMU {})",
                        vm.keep()
                    ));
                }
                DONE
            }
            End::Asked(OnExit::Kill) => {
                // Each of them, whatever becomes of the others.
                let killed: Vec<_> = vms.into_iter().map(|(_, mut vm)| vm.kill()).collect();
                killed.into_iter().collect::<Result<(), _>>().map_err(|e| Failure::qemu(&e))?;
                DONE
            }
            End::Asked(OnExit::Keep) => {
                run_dir.keep();
                for (number, (name, vm)) in vms.into_iter().enumerate() {
                    let dir = if is_group {
                        run_dir.path().join(number.to_string())
                    } else {
                        run_dir.path().into()
                    };
                    let monitor = dir.join("qmp.sock");
                    let pid = vm.keep();
                    say(&format!(
                        "VM {name} runs on without checkpoints: QEMU {pid}, monitor {}",
                        monitor.display()
                    ));
                }
                DONE
            }
        };
        if let Some(lans) = beside.lans {
            lans.end();
        }
        if let Some(disks) = beside.disks {
            let place = if keeps { disks.keep() } else { disks.end()? };
            if let Some(place) = place {
                say(&format!(
                    "what the guest has written to its disks is in {}; the images are as they were",
                    place.display()
                ));
            }
        }
        finished?;
        self.options.quiet |= code == FAILED;
        if !self.options.quiet {
            eprintln!("keyframe: {} checkpoints sealed, {} failed", self.sealed, self.failed);
        }
        Ok(match code {
            DONE if self.audited_wrong > 0 || self.given_up => FAILED,
            DONE if self.failed > 0 => WARNED,
            code => code,
        })
    }
}
