//! The VMs in a checkpoint, with their RAM as image files.

use crate::error::{Error, Result};
use keyframe_capture::group::split_device_states;
use keyframe_image::{GuestView, Image};
use keyframe_machine::{CpuRegisters, VmmKind};
use keyframe_qemu::restore::RamSource;
use keyframe_qemu::stream;
use keyframe_store::{LoadedCheckpoint, MachineMeta};
use keyframe_units::error_chain;
use keyframe_units::{CheckpointId, Page, PageIndex, PageRange, RamLayout};
use std::io;
use std::sync::{Arc, Mutex};

/// A [`RamSource`] over the pages of one VM in a checkpoint, which it numbers from 0.
pub struct StoredPages<'a> {
    loaded: &'a LoadedCheckpoint,
    /// The VM's first page among the pages of its group.
    first: PageIndex,
    /// The store's error of the last read that failed.
    failed: Mutex<Option<keyframe_store::Error>>,
}

/// The error that ended a read of pages.
pub enum ReadStop {
    /// The store could not be read.
    Store(keyframe_store::Error),
    /// The receiver of the pages failed.
    Receiver(io::Error),
}

impl From<keyframe_store::Error> for ReadStop {
    fn from(error: keyframe_store::Error) -> Self {
        Self::Store(error)
    }
}

impl From<ReadStop> for io::Error {
    fn from(stop: ReadStop) -> Self {
        match stop {
            ReadStop::Store(error) => Self::other(error_chain(&error)),
            ReadStop::Receiver(error) => error,
        }
    }
}

impl<'a> StoredPages<'a> {
    /// Makes the source of the pages of `guest`, one of the VMs in `loaded`.
    pub fn new(loaded: &'a LoadedCheckpoint, guest: &Guest) -> Self {
        Self { loaded, first: guest.first, failed: Mutex::default() }
    }

    /// Returns the store's error of the last read that failed, and forgets it. Returns `None` if
    /// there is none.
    pub fn failed(&self) -> Option<keyframe_store::Error> {
        self.failed.lock().ok().and_then(|mut failed| failed.take())
    }

    /// Notes the store's error of a read.
    fn noted(&self, read: Result<(), ReadStop>) -> io::Result<()> {
        match read {
            Ok(()) => Ok(()),
            Err(ReadStop::Receiver(error)) => Err(error),
            Err(ReadStop::Store(error)) => {
                let text = error_chain(&error);
                if let Ok(mut failed) = self.failed.lock() {
                    *failed = Some(error);
                }
                Err(io::Error::other(text))
            }
        }
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
            sink(PageIndex(page.0 - first), content).map_err(ReadStop::Receiver)
        });
        self.noted(read)
    }

    fn read_some(
        &self,
        pages: &[PageIndex],
        sink: &mut dyn FnMut(PageIndex, &Page) -> io::Result<()>,
    ) -> io::Result<()> {
        let first = self.first.0;
        let in_group: Vec<_> = pages.iter().map(|page| PageIndex(first + page.0)).collect();
        let read = self.loaded.read_some(&in_group, &mut |page, content| {
            sink(PageIndex(page.0 - first), content).map_err(ReadStop::Receiver)
        });
        self.noted(read)
    }
}

/// A [`RamSource`] over all pages of a checkpoint, for a restore.
pub struct CheckpointRam(pub Arc<LoadedCheckpoint>);

impl RamSource for CheckpointRam {
    fn read(
        &self,
        range: PageRange,
        sink: &mut dyn FnMut(PageIndex, &Page) -> io::Result<()>,
    ) -> io::Result<()> {
        Ok(self.0.read_pages(range, &mut |page, content| {
            sink(page, content).map_err(ReadStop::Receiver)
        })?)
    }

    fn read_some(
        &self,
        pages: &[PageIndex],
        sink: &mut dyn FnMut(PageIndex, &Page) -> io::Result<()>,
    ) -> io::Result<()> {
        Ok(self.0.read_some(pages, &mut |page, content| {
            sink(page, content).map_err(ReadStop::Receiver)
        })?)
    }

    fn wanted_first(&self) -> Vec<PageIndex> {
        self.0.expected_first()
    }
}

/// A VM in a checkpoint: the only one, or a member of a group.
#[derive(Clone, Debug)]
pub struct Guest {
    /// Its name in the group; `None` for a checkpoint of one VM.
    pub member: Option<String>,
    /// Its RAM blocks.
    pub ram: RamLayout,
    /// Its machine.
    pub machine: MachineMeta,
    /// The device state, as its VMM saved it.
    pub device_state: Vec<u8>,
    checkpoint: CheckpointId,
    first: PageIndex,
}

impl Guest {
    /// Returns the VMs of a checkpoint: one, or the members of a group in their order.
    ///
    /// Error: [`Error::MembersContradict`] if the members do not match the checkpoint's RAM or its
    /// device states.
    pub fn all(loaded: &LoadedCheckpoint) -> Result<Vec<Self>> {
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
        let contradicts = || Error::MembersContradict { checkpoint };
        let rams = meta.members_ram().ok_or_else(contradicts)?;
        // The last state describes the network between the members.
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

    /// Returns the VM called `member` in a group, or the only VM. `member` may be `None` for a
    /// checkpoint of one VM.
    ///
    /// Errors: there is no such VM; there are several VMs and `member` is `None`.
    pub fn choose(loaded: &LoadedCheckpoint, member: Option<&str>) -> Result<Self> {
        let (checkpoint, vm) = (loaded.id, &loaded.meta.vm);
        let mut all = Self::all(loaded)?;
        let names: Vec<&str> = all.iter().filter_map(|guest| guest.member.as_deref()).collect();
        let members = names.join(", ");
        let number = match member {
            None if names.is_empty() => 0,
            None => {
                return Err(Error::GroupNeedsMember { checkpoint, group: vm.clone(), members });
            }
            Some(name) if names.is_empty() => {
                let (vm, member) = (vm.clone(), name.to_owned());
                return Err(Error::NotAGroup { checkpoint, vm, member });
            }
            Some(name) => {
                let unknown = Error::NoMember {
                    checkpoint,
                    group: vm.clone(),
                    member: name.to_owned(),
                    members,
                };
                names.iter().position(|n| *n == name).ok_or(unknown)?
            }
        };
        Ok(all.swap_remove(number))
    }

    /// Returns the VM's RAM as a raw image, addressed as the guest sees it. Errors: the guest map
    /// is unknown or contradicts the RAM blocks.
    pub fn raw(&self) -> Result<Image> {
        Ok(Image::raw(&self.view()?))
    }

    /// Returns the VM's RAM and registers as an ELF core file. Errors: those of [`Self::raw`]; the
    /// device state holds no readable registers.
    pub fn core(&self) -> Result<Image> {
        Ok(Image::core(&self.view()?, self.machine.processor, &self.registers()?))
    }

    /// The registers of all its processors.
    fn registers(&self) -> Result<Vec<CpuRegisters>> {
        match self.machine.vmm {
            VmmKind::Qemu => Ok(stream::cpu_registers(&self.device_state, self.machine.processor)?),
            VmmKind::Firecracker => keyframe_firecracker::registers::read(&self.device_state)
                .map_err(Box::new)
                .map_err(|source| Error::Registers { checkpoint: self.checkpoint, source }),
        }
    }

    /// The places of RAM in the guest's physical address space.
    fn view(&self) -> Result<GuestView> {
        let (ram, machine) = (&self.ram, &self.machine);
        let fail = |source| Error::Image { checkpoint: self.checkpoint, source };
        let worked_out;
        let map = if let Some(map) = &machine.guest_map {
            map
        } else {
            worked_out = GuestView::flat_map(ram, &machine.machine_type, &machine.user_command)
                .map_err(fail)?;
            &worked_out
        };
        // Only QEMU's machines show ROM in place of RAM below 1 MiB.
        let shadows = if machine.has_migration_stream() {
            stream::low_memory(&self.device_state)?
        } else {
            None
        };
        GuestView::new(ram, map, shadows.as_deref()).map_err(fail)
    }
}
