//! The end of a run: what was captured is sealed, QEMU is ended or left to itself.

use super::{DONE, End, Engine, FAILED, Failure, Inbox, OnExit, Outcome, StoreSink, WARNED};

impl Engine<'_> {
    /// What was captured is sealed before the run ends.
    fn seal_the_rest(&mut self) -> Result<(), Failure> {
        let sink = self.end_encoding()?;
        sink.finish().map_err(|e| Failure::store(&e, self.store.path()))
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
        // For the loop, where it goes on with another encoder; where it does not, who asked is told that the engine has ended.
        for request in requests {
            let _ = self.inbox_sender.send(request);
        }
        Ok(sink)
    }

    pub(super) fn finish(mut self, end: Result<End, Failure>) -> Outcome {
        keyframe_kernel::priority::lower();
        let finished = self.seal_the_rest();
        let mut run_dir = self.run_dir;
        // The tracker goes with the cycle: QEMU is on its own again before it is ended or left.
        drop(self.copying);
        let mut vm = self.machine.into_vm();
        if let (true, Some(count)) = (self.given_up, self.options.count.filter(|n| *n > self.sealed)) {
            eprintln!(
                "keyframe: the {count} checkpoints of --count cannot be reached: {} are sealed",
                self.sealed
            );
        }
        let code = match end? {
            End::Vm(exit) => {
                if exit.success() {
                    // Its console is somebody else's.
                    if vm.is_attached() && !self.options.quiet {
                        eprintln!("keyframe: VM {} has ended", self.name);
                    }
                    DONE
                } else {
                    eprintln!("keyframe: QEMU ended with {exit}");
                    FAILED
                }
            }
            End::Asked(_) if vm.is_attached() => {
                let pid = vm.keep();
                if !self.options.quiet {
                    eprintln!(
                        "keyframe: detached: VM {} runs on without checkpoints (QEMU {pid})",
                        self.name
                    );
                }
                DONE
            }
            End::Asked(OnExit::Kill) => {
                vm.kill().map_err(|e| Failure::qemu(&e))?;
                DONE
            }
            End::Asked(OnExit::Keep) => {
                run_dir.keep();
                let pid = vm.keep();
                if !self.options.quiet {
                    eprintln!(
                        "keyframe: VM {} runs on without checkpoints: QEMU {pid}, monitor {}",
                        self.name,
                        run_dir.path().join("qmp.sock").display()
                    );
                }
                DONE
            }
        };
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
