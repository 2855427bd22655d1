//! A checkpoint's VMs as image files, over the store.

use keyframe_capture::group::split_device_states;
use keyframe_failure::{Failure, chain};
use keyframe_image::{GuestView, Image};
use keyframe_qemu::restore::RamSource;
use keyframe_qemu::stream;
use keyframe_store::{Loaded, MachineMeta};
use keyframe_units::{CheckpointId, Page, PageIndex, PageRange, RamLayout};
use std::io;
use std::sync::Mutex;

/// The pages of a VM in a checkpoint, which it counts from 0 on.
pub struct StoredPages<'a> {
    loaded: &'a Loaded,
    /// Where its own begin among those of its group.
    first: PageIndex,
    /// Why the store could not be read, where it was that.
    failed: Mutex<Option<keyframe_store::Error>>,
}

/// What ends the reading of pages: the store, or whoever takes them.
pub enum Stop {
    /// The store.
    Store(keyframe_store::Error),
    /// Who takes them.
    Taker(io::Error),
}

impl From<keyframe_store::Error> for Stop {
    fn from(error: keyframe_store::Error) -> Self {
        Self::Store(error)
    }
}

impl From<Stop> for io::Error {
    fn from(stop: Stop) -> Self {
        match stop {
            Stop::Store(error) => Self::other(chain(&error)),
            Stop::Taker(error) => error,
        }
    }
}

impl<'a> StoredPages<'a> {
    /// Those of `guest` in `loaded`.
    pub fn new(loaded: &'a Loaded, guest: &Guest) -> Self {
        Self { loaded, first: guest.first, failed: Mutex::default() }
    }

    /// The store's error behind the last failed read, once.
    pub fn failed(&self) -> Option<keyframe_store::Error> {
        self.failed.lock().ok().and_then(|mut failed| failed.take())
    }
}

impl RamSource for StoredPages<'_> {
    fn read(
        &self,
        range: PageRange,
        sink: &mut dyn FnMut(PageIndex, &Page) -> io::Result<()>,
    ) -> io::Result<()> {
        let first = self.first.0;
        let in_group = PageRange::new(PageIndex(first + range.first.0), range.len_pages);
        let read = self.loaded.read_pages_by_all_cores(in_group, &mut |page, content| {
            sink(PageIndex(page.0 - first), content).map_err(Stop::Taker)
        });
        match read {
            Ok(()) => Ok(()),
            Err(Stop::Taker(error)) => Err(error),
            Err(Stop::Store(error)) => {
                let text = chain(&error);
                if let Ok(mut failed) = self.failed.lock() {
                    *failed = Some(error);
                }
                Err(io::Error::other(text))
            }
        }
    }
}

/// A VM as a checkpoint has it: the only one, or a member of a group.
#[derive(Clone, Debug)]
pub struct Guest {
    /// Its name in the group; none where it is alone.
    pub member: Option<String>,
    /// Its RAM blocks.
    pub ram: RamLayout,
    /// Its machine.
    pub machine: MachineMeta,
    /// As its QEMU gave it.
    pub device_state: Vec<u8>,
    checkpoint: CheckpointId,
    first: PageIndex,
}

impl Guest {
    /// Those of a checkpoint: one, or a group's members in their order.
    pub fn all(loaded: &Loaded) -> Result<Vec<Self>, Failure> {
        let (meta, checkpoint) = (&loaded.meta, loaded.id);
        if meta.members.is_empty() {
            return Ok(vec![Self {
                member: None,
                ram: meta.ram.clone(),
                machine: meta.machine.clone(),
                device_state: loaded.device_state.clone(),
                checkpoint,
                first: PageIndex(0),
            }]);
        }
        let contradicts = || {
            Failure::new(format!(
                "checkpoint {checkpoint}: what it says of its members contradicts itself"
            ))
        };
        let rams = meta.members_ram().ok_or_else(contradicts)?;
        // The last one is the network's.
        let states = split_device_states(&loaded.device_state)
            .filter(|states| states.len() == meta.members.len() + 1)
            .ok_or_else(contradicts)?;
        let members = meta.members.iter().zip(rams).zip(states);
        let guests = members.map(|((member, (ram, first)), state)| Self {
            member: Some(member.name.clone()),
            ram,
            machine: member.machine.clone(),
            device_state: state.to_vec(),
            checkpoint,
            first,
        });
        Ok(guests.collect())
    }

    /// The one called `member` in a group, or the only one.
    pub fn choose(loaded: &Loaded, member: Option<&str>) -> Result<Self, Failure> {
        let (id, vm) = (loaded.id, &loaded.meta.vm);
        let mut all = Self::all(loaded)?;
        let names: Vec<&str> = all.iter().filter_map(|guest| guest.member.as_deref()).collect();
        let list = names.join(", ");
        let place = match member {
            None if names.is_empty() => 0,
            None => {
                return Err(Failure::new(format!(
                    "checkpoint {id} is of a group, {vm}, of the VMs {list}"
                ))
                .fix("say which one with --member NAME"));
            }
            Some(name) if names.is_empty() => {
                return Err(Failure::new(format!(
                    "checkpoint {id} is of one VM, {vm}: it has no member {name}"
                ))
                .fix("leave --member out"));
            }
            Some(name) => names.iter().position(|n| *n == name).ok_or_else(|| {
                Failure::new(format!("checkpoint {id} of group {vm} has no member {name}"))
                    .fix(format!("its members are {list}"))
            })?,
        };
        Ok(all.swap_remove(place))
    }

    /// The raw image of its RAM.
    pub fn raw(&self) -> Result<Image, Failure> {
        Ok(Image::raw(&self.view()?))
    }

    /// Its core file.
    pub fn core(&self) -> Result<Image, Failure> {
        let view = self.view()?;
        let cpus = stream::cpu_registers(&self.device_state).map_err(|e| Failure::qemu(&e))?;
        Ok(Image::core(&view, &cpus))
    }

    /// Where the guest sees its RAM.
    fn view(&self) -> Result<GuestView, Failure> {
        let (ram, machine) = (&self.ram, &self.machine);
        let fail = |e: keyframe_image::Error| {
            let fix = e.fix();
            Failure {
                fix,
                ..Failure::new(format!("checkpoint {}: {}", self.checkpoint, chain(&e)))
            }
        };
        let worked_out;
        let map = if let Some(map) = &machine.guest_map {
            map
        } else {
            worked_out = GuestView::flat_map(ram, &machine.machine_type, &machine.user_command)
                .map_err(fail)?;
            &worked_out
        };
        let shadows = stream::shadowed(&self.device_state).map_err(|e| Failure::qemu(&e))?;
        GuestView::new(ram, map, shadows.as_deref()).map_err(fail)
    }
}
