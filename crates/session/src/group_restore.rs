//! The members of a group in its checkpoint, for their restore.
//!
//! ```text
//!   a group's checkpoint ─┬─ page space ──▶ MemberRam of each member, pages numbered from 0
//!                         ├─ device states ─▶ one for each member, and the network's:
//!                         └─ InFlight ◀────── the packets between the members
//! ```

use crate::error::{Error, Result};
use keyframe_capture::group::split_device_states;
use keyframe_net::InFlight;
use keyframe_qemu::cmdline::replace_lan;
use keyframe_qemu::restore::lazy::SharedSource;
use keyframe_qemu::restore::{self, Plan, RamSource, Restored};
use keyframe_store::{MachineMeta, MemberMeta, Meta};
use keyframe_units::{CheckpointId, Page, PageIndex, PageRange, RamLayout};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A member of a group, as it is in a checkpoint.
pub struct GroupMember<'a> {
    /// The checkpoint's description of the member.
    pub meta: &'a MemberMeta,
    /// Its RAM blocks.
    pub ram: RamLayout,
    /// The pages of its RAM.
    pub source: Arc<MemberRam>,
    /// Its device state, as QEMU saved it.
    pub device_state: &'a [u8],
}

/// The RAM of one member: a part of the group's pages, numbered from 0.
pub struct MemberRam {
    group: SharedSource,
    first: u64,
    len_pages: u64,
}

impl MemberRam {
    fn of_member(&self, page: PageIndex) -> Option<PageIndex> {
        page.0.checked_sub(self.first).filter(|own| *own < self.len_pages).map(PageIndex)
    }
}

impl RamSource for MemberRam {
    fn read(
        &self,
        range: PageRange,
        sink: &mut dyn FnMut(PageIndex, &Page) -> io::Result<()>,
    ) -> io::Result<()> {
        let of_group = PageRange::new(PageIndex(self.first + range.first.0), range.len_pages);
        self.group
            .read(of_group, &mut |page, content| sink(PageIndex(page.0 - self.first), content))
    }

    fn read_some(
        &self,
        pages: &[PageIndex],
        sink: &mut dyn FnMut(PageIndex, &Page) -> io::Result<()>,
    ) -> io::Result<()> {
        let of_group: Vec<PageIndex> =
            pages.iter().map(|page| PageIndex(self.first + page.0)).collect();
        self.group.read_some(&of_group, &mut |page, content| {
            sink(PageIndex(page.0 - self.first), content)
        })
    }

    fn wanted_first(&self) -> Vec<PageIndex> {
        self.group.wanted_first().into_iter().filter_map(|page| self.of_member(page)).collect()
    }
}

/// Returns the members of the group in checkpoint `id`, in their order, and the packets that were
/// in flight between them. `device_state` is that of the checkpoint, `ram` reads the pages of all
/// members.
///
/// Errors: [`Error::MembersContradict`] if the members do not match the checkpoint's RAM or its
/// device states, [`Error::InFlightPackets`] if the packets cannot be decoded.
pub fn members<'a>(
    id: CheckpointId,
    meta: &'a Meta,
    device_state: &'a [u8],
    ram: &SharedSource,
) -> Result<(Vec<GroupMember<'a>>, InFlight)> {
    let rams = meta.members_ram().ok_or(Error::MembersContradict(id))?;
    let states = split_device_states(device_state)
        .filter(|states| states.len() == meta.members.len() + 1)
        .ok_or(Error::MembersContradict(id))?;
    let in_flight = match states.last() {
        Some(bytes) if !bytes.is_empty() => InFlight::decode(bytes)
            .map_err(|source| Error::InFlightPackets { checkpoint: id, source })?,
        _ => InFlight::default(),
    };
    let member = |((meta, (layout, first)), device_state): ((_, (RamLayout, PageIndex)), _)| {
        let (group, len_pages) = (Arc::clone(ram), layout.len_pages());
        let source = Arc::new(MemberRam { group, first: first.0, len_pages });
        GroupMember { meta, ram: layout, source, device_state }
    };
    Ok((meta.members.iter().zip(rams).zip(states).map(member).collect(), in_flight))
}

/// The networks of a group that are at another socket than they were at the checkpoint.
#[derive(Clone, Debug, Default)]
pub struct MovedLans(Vec<(PathBuf, PathBuf)>);

impl MovedLans {
    /// Makes the value from pairs of absolute paths: the recorded socket of a network and the
    /// present one.
    pub fn new(moves: Vec<(PathBuf, PathBuf)>) -> Self {
        Self(moves)
    }

    /// Returns the present socket of the network whose recorded socket is `lan`; `lan` itself if it
    /// has not moved.
    pub fn now(&self, lan: &str) -> String {
        let moved = self.0.iter().find(|(from, _)| from == Path::new(lan));
        moved.map_or_else(|| lan.to_owned(), |(_, to)| to.display().to_string())
    }

    /// Returns the command line of `machine` with its network links changed to the present sockets.
    pub fn line(&self, machine: &MachineMeta) -> Vec<String> {
        let directory = Path::new(&machine.working_directory);
        let lead = |line: Vec<String>, (from, to): &(PathBuf, PathBuf)| {
            replace_lan(&line, directory, from, &to.display().to_string())
        };
        self.0.iter().fold(machine.user_command.clone(), lead)
    }
}

/// A member of a group that could not be started.
#[derive(Debug, thiserror::Error)]
#[error("VM {name}: {source}")]
pub struct FailedMember {
    /// The member's name.
    pub name: String,
    /// The reason.
    pub source: keyframe_qemu::Error,
}

/// Starts `members` by `plans`, which are in the same order. With `lazy` their RAM is loaded while
/// they run. If one fails, the others are ended: a group without a member is useless. Error: that of
/// the first member that failed.
pub fn start_members(
    members: &[GroupMember<'_>],
    plans: Vec<Plan>,
    lazy: bool,
) -> Result<Vec<Restored>, FailedMember> {
    let start = |(member, plan): (&GroupMember<'_>, Plan)| {
        let started = if lazy {
            restore::start_lazy(plan, Arc::clone(&member.source) as _, member.device_state)
        } else {
            restore::start(plan, &*member.source, member.device_state)
        };
        started.map_err(|source| FailedMember { name: member.meta.name.clone(), source })
    };
    let all = members.iter().zip(plans);
    if lazy {
        // A VM whose RAM is not there yet ends with the thread that started it.
        return all_or_none(all.map(start).collect());
    }
    all_or_none(std::thread::scope(|scope| {
        let start = &start;
        let threads: Vec<_> = all.map(|one| scope.spawn(move || start(one))).collect();
        threads
            .into_iter()
            .map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    }))
}

fn all_or_none(
    results: Vec<Result<Restored, FailedMember>>,
) -> Result<Vec<Restored>, FailedMember> {
    let (mut members, mut failure) = (Vec::with_capacity(results.len()), None);
    for result in results {
        match result {
            Ok(member) => members.push(member),
            Err(error) => failure = failure.or(Some(error)),
        }
    }
    match failure {
        None => Ok(members),
        Some(failure) => {
            end_members(&mut members);
            Err(failure)
        }
    }
}

/// Ends `members` after an error. Further errors are ignored: the user gets the first one.
pub fn end_members(members: &mut [Restored]) {
    for member in members {
        let _ = member.kill();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyframe_capture::group::join_device_states;
    use keyframe_store::{Counts, Timing};
    use keyframe_units::{BlockKind, Epoch, PAGE_BYTES, RamBlock};

    /// Ten pages: each begins with its number.
    struct Numbered;

    impl RamSource for Numbered {
        fn read(
            &self,
            range: PageRange,
            sink: &mut dyn FnMut(PageIndex, &Page) -> io::Result<()>,
        ) -> io::Result<()> {
            for page in range.first.0..range.first.0 + range.len_pages {
                let mut content = [0; PAGE_BYTES];
                content[0] = page as u8;
                sink(PageIndex(page), &content)?;
            }
            Ok(())
        }

        fn wanted_first(&self) -> Vec<PageIndex> {
            [9, 3, 7, 2].map(PageIndex).to_vec()
        }
    }

    #[test]
    fn a_member_reads_its_own_pages_of_the_group() {
        let ram = MemberRam { group: Arc::new(Numbered), first: 3, len_pages: 5 };
        let mut read = Vec::new();
        let mut note = |page: PageIndex, content: &Page| {
            read.push((page.0, content[0]));
            Ok(())
        };
        ram.read(PageRange::new(PageIndex(0), 2), &mut note).unwrap();
        ram.read_some(&[PageIndex(4)], &mut note).unwrap();
        assert_eq!(read, [(0, 3), (1, 4), (4, 7)]);
        assert_eq!(ram.wanted_first(), [0, 4].map(PageIndex));
    }

    #[test]
    fn links_lead_to_the_present_socket() {
        let moved = MovedLans::new(vec![("/run/old".into(), "/run/new".into())]);
        assert_eq!((moved.now("/run/old"), moved.now("/x")), ("/run/new".into(), "/x".into()));
        let link = |socket: &str| {
            let words = ["-netdev", "stream,id=a,addr.type=unix,addr.path="];
            vec![words[0].to_owned(), format!("{}{socket}", words[1])]
        };
        let machine = MachineMeta {
            user_command: link("old"),
            working_directory: "/run".into(),
            ..MachineMeta::default()
        };
        assert_eq!(moved.line(&machine), link("/run/new"));
    }

    /// The checkpoint of a group of `a`, with two RAM blocks, and `b`, with one.
    fn of_group() -> Meta {
        let block = |name: &str, pages: u64| RamBlock {
            name: name.into(),
            kind: BlockKind::Backend,
            used_bytes: 4096 * pages,
            total_bytes: 4096 * pages,
        };
        let blocks = [block("a/pc.ram", 3), block("a/pc.bios", 2), block("b/pc.ram", 5)];
        let member = |name: &str, ram_blocks| MemberMeta {
            name: name.into(),
            ram_blocks,
            ..MemberMeta::default()
        };
        Meta {
            vm: "group".into(),
            run: String::new(),
            epoch: Epoch(0),
            parent: None,
            taken_at: jiff::Timestamp::UNIX_EPOCH,
            since_boot: None,
            reason: "take".into(),
            ram: RamLayout::new(blocks.to_vec()).unwrap(),
            disks: Vec::new(),
            machine: MachineMeta::default(),
            members: vec![member("a", 2), member("b", 1)],
            timing: Timing::default(),
            counts: Counts::default(),
            origin: None,
            map_chain: vec![7],
        }
    }

    #[test]
    fn a_group_is_split_into_its_members_and_one_that_contradicts_itself_is_refused() {
        let (id, ram): (_, SharedSource) = (CheckpointId(7), Arc::new(Numbered));
        let mut meta = of_group();
        let states = [b"first".to_vec(), b"second".to_vec(), Vec::new()];
        let joined = join_device_states(&states);
        let (found, in_flight) = members(id, &meta, &joined, &ram).unwrap();
        let shown: Vec<_> =
            found.iter().map(|m| (&*m.meta.name, m.ram.len_pages(), m.device_state)).collect();
        assert_eq!(shown, [("a", 5, &b"first"[..]), ("b", 5, &b"second"[..])]);
        assert_eq!(found[1].source.wanted_first(), [4, 2].map(PageIndex));
        assert!(in_flight.ports.is_empty());
        let refused = |meta: &Meta, states: &[Vec<u8>]| {
            members(id, meta, &join_device_states(states), &ram).err().unwrap().to_string()
        };
        assert!(refused(&meta, &states[..2]).contains("contradicts itself"));
        let damaged = [b"first".to_vec(), b"second".to_vec(), b"junk".to_vec()];
        assert!(refused(&meta, &damaged).starts_with("checkpoint 7: "));
        meta.members.pop();
        assert!(refused(&meta, &states).contains("contradicts itself"));
    }
}
