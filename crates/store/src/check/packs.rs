//! Checks one pack against what maps want of it.

use crate::Error;
use crate::identity::PageRef;
use crate::pack_file::{Ending, PackFile};
use crate::record::Entry;
use crate::store::Inner;
use keyframe_store_backend::layout;
use std::collections::{BTreeMap, BTreeSet};

/// Bad records next to each other, with one problem.
#[derive(Debug)]
pub struct PackBounds {
    pub object: String,
    pub problem: String,
    /// The records, rising.
    pub refs: Vec<PageRef>,
    /// Their bytes are whole: it is what they are composed of that is not there. A prune may leave
    /// such where nothing needs it.
    pub stale: bool,
}

/// What a pack's check found.
#[derive(Debug, Default)]
pub struct Findings {
    /// Records that hold.
    pub records: u64,
    /// Records that do not, whether or not anything needs them.
    pub bad: Vec<PackBounds>,
    /// Damage that hurts no record: object and problem.
    pub harmless: Vec<(String, String)>,
    pub notes: Vec<String>,
}

/// Tell the caller about every this many bytes.
const TELL_BYTES: u64 = 16 << 20;

/// Checks pack `number`; `wanted` are the offsets that maps refer to, rising. `tell` hears how far
/// it is.
pub fn check_pack(
    inner: &Inner,
    number: u32,
    wanted: &[u64],
    read_data: bool,
    tell: &mut dyn FnMut(u64),
) -> Findings {
    let mut findings = Findings::default();
    let name = layout::pack(number);
    let looked = PackFile::open(inner, number).and_then(|pack| {
        let len_bytes = pack.file.len_bytes()?;
        let ending = pack.ending(len_bytes);
        Ok((pack, len_bytes, ending))
    });
    let (pack, len_bytes, ending) = match looked {
        Ok(found) => found,
        Err(error) => {
            let (object, problem) = super::explain(inner, &name, error);
            if wanted.is_empty() {
                findings
                    .notes
                    .push(format!("{name}: unfinished ({problem}); nothing refers to it"));
            } else {
                let refs = wanted.iter().map(|at| PageRef(u64::from(number) << 40 | at)).collect();
                findings.bad.push(PackBounds { object, problem, refs, stale: false });
            }
            return findings;
        }
    };
    let (problems, stale) = (BTreeMap::new(), BTreeSet::new());
    let mut walk = Walk { inner, pack: &pack, good: Vec::new(), problems, stale, told: 0, tell };
    let start = pack.first;
    if matches!(ending, Ending::Closed { .. })
        && pack.is_dense()
        && let Err(problem) = pack.dictionary()
    {
        // Whom it hurts is found out below.
        findings.harmless.push((pack.object.clone(), problem));
    }
    let read_data = read_data || !findings.harmless.is_empty();
    let mut expected: Vec<u64> = wanted.to_vec();
    match ending {
        Ending::Closed { entries, records_end } => {
            if read_data {
                let resume: Vec<u64> = entries.iter().map(Entry::offset).collect();
                walk.run(start, records_end, &resume);
                if walk.problems.is_empty() && walk.good != entries {
                    let problem = "its index does not list the records that it holds".into();
                    findings.harmless.push((pack.object.clone(), problem));
                }
                expected.extend(resume);
                expected.sort_unstable();
                expected.dedup();
            } else {
                walk.good = entries;
                walk.composed(wanted);
            }
        }
        Ending::Unfinished => {
            let skipped = walk.run(start, len_bytes, wanted);
            let why = if skipped > 0 {
                format!("; {skipped} bytes hold no readable record and nothing refers to them")
            } else {
                String::new()
            };
            findings.notes.push(format!(
                "{name}: unfinished, its writer was stopped or is still at work{why}"
            ));
        }
        Ending::Damaged(problem) => {
            walk.run(start, len_bytes, wanted);
            let problem = format!("{problem}; the pages before it were read one by one instead");
            findings.harmless.push((pack.object.clone(), problem));
        }
    }
    findings.records = walk.good.len() as u64;
    let Walk { good, problems, stale, .. } = walk;
    expected.retain(|at| good.binary_search_by_key(at, Entry::offset).is_err());
    let (whole, broken): (Vec<u64>, Vec<u64>) =
        expected.into_iter().partition(|at| stale.contains(at));
    findings.bad = group(&pack, &broken, &problems, false);
    findings.bad.extend(group(&pack, &whole, &problems, true));
    findings
}

/// Reads a pack record by record, going on at the next known place behind a bad one.
struct Walk<'a> {
    inner: &'a Inner,
    pack: &'a PackFile,
    good: Vec<Entry>,
    problems: BTreeMap<u64, String>,
    /// Of these: records whose bytes are whole.
    stale: BTreeSet<u64>,
    told: u64,
    tell: &'a mut dyn FnMut(u64),
}

impl Walk<'_> {
    /// Walks `start..end`; `resume` are offsets (rising) where records are known or wanted to
    /// begin. Returns how many bytes were skipped that nothing in `resume` points at.
    fn run(&mut self, start: u64, end: u64, resume: &[u64]) -> u64 {
        let (mut at, mut skipped) = (start, 0);
        loop {
            let Self { good, problems, stale, told, tell, .. } = self;
            let mut visit = |held: Result<Entry, (u64, String)>| match held {
                Ok(entry) => {
                    good.push(entry);
                    if entry.offset() - *told > TELL_BYTES {
                        *told = entry.offset();
                        tell(*told);
                    }
                }
                Err((at, problem)) => {
                    stale.insert(at);
                    problems.insert(at, problem);
                }
            };
            let Some((stop, problem)) = self.pack.walk(self.inner, at, end, &mut visit) else {
                return skipped;
            };
            let is_known = resume.binary_search(&stop).is_ok();
            self.problems.insert(stop, problem);
            let next = resume.get(resume.partition_point(|known| *known <= stop)).copied();
            let next = next.filter(|next| *next < end);
            if !is_known {
                skipped += next.unwrap_or(end) - stop;
            }
            match next {
                Some(next) => at = next,
                None => return skipped,
            }
        }
    }

    /// Reads the composed ones among the `wanted` records of the index, and with them what they
    /// refer to: that it is there, no index of this pack tells.
    fn composed(&mut self, wanted: &[u64]) {
        let is_asked = |entry: &Entry| {
            entry.kind().is_derived() && wanted.binary_search(&entry.offset()).is_ok()
        };
        let (inner, number) = (self.inner, self.pack.number);
        let (problems, stale) = (&mut self.problems, &mut self.stale);
        self.good.retain(|entry| {
            let place = [(PageRef::new(number, entry.offset()), ())];
            let read = if is_asked(entry) {
                inner.read_pages(&place, &mut |(), _| Ok::<_, Error>(()))
            } else {
                Ok(())
            };
            if let Err(error) = &read {
                problems.insert(entry.offset(), error.to_string());
                stale.insert(entry.offset());
            }
            read.is_ok()
        });
    }
}

/// Bad offsets that follow each other with the same problem become one.
fn group(
    pack: &PackFile,
    bad: &[u64],
    problems: &BTreeMap<u64, String>,
    stale: bool,
) -> Vec<PackBounds> {
    let problem_at = |at: &u64| {
        problems.get(at).map_or("a map refers to it, but no record begins there", String::as_str)
    };
    let groups = bad.chunk_by(|a, b| problem_at(a) == problem_at(b));
    let describe = |group: &[u64]| {
        let [first, .., last] = group else {
            let at = group.first().copied().unwrap_or_default();
            return format!("{} at offset {at}", pack.object);
        };
        format!("{}: {} records at offsets {first} to {last}", pack.object, group.len())
    };
    groups
        .map(|group| PackBounds {
            object: describe(group),
            problem: group.first().map(problem_at).unwrap_or_default().into(),
            refs: group.iter().map(|at| PageRef::new(pack.number, *at)).collect(),
            stale,
        })
        .collect()
}
