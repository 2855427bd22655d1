//! Checks one pack, and the records in it that maps refer to.

use crate::Error;
use crate::check::report::explain;
use crate::open_store::OpenStore;
use crate::pack_file::{PackEnding, PackFile};
use keyframe_store_backend::layout;
use keyframe_store_format::pack::PackEntry;
use keyframe_store_format::page_ref::PageRef;
use std::collections::{BTreeMap, BTreeSet};

/// Damaged records next to each other in a pack, with the same problem.
#[derive(Debug)]
pub struct PackBounds {
    pub object: String,
    pub problem: String,
    /// The places of the records, in rising order.
    pub refs: Vec<PageRef>,
    /// True if their bytes are correct, and records that they refer to are missing. A prune may
    /// leave such records if nothing needs them.
    pub stale: bool,
}

/// The result of the check of one pack.
#[derive(Debug, Default)]
pub struct Findings {
    /// The number of correct records.
    pub records: u64,
    /// The damaged records, needed or not.
    pub bad: Vec<PackBounds>,
    /// Damage that affects no record: object and problem of each.
    pub harmless: Vec<(String, String)>,
    pub notes: Vec<String>,
}

/// The bytes between two reports of progress.
const TELL_BYTES: u64 = 16 << 20;

/// Checks pack `number` and returns the findings. `wanted` are the offsets of the records that maps
/// refer to, in rising order. If `read_data` is true, reads every page. Calls `tell` with the
/// offset that it has reached.
pub fn check_pack(
    inner: &OpenStore,
    number: u32,
    wanted: &[u64],
    read_data: bool,
    tell: &mut dyn FnMut(u64),
) -> Findings {
    let opened = inner.open_pack(number).and_then(|pack| {
        let len_bytes = pack.file.len_bytes()?;
        let ending =
            pack.ending(len_bytes).unwrap_or_else(|error| PackEnding::Damaged(error.to_string()));
        Ok((pack, len_bytes, ending))
    });
    let (pack, len_bytes, ending) = match opened {
        Ok(opened) => opened,
        Err(error) => return unreadable_pack(inner, number, wanted, error),
    };
    let mut findings = Findings::default();
    let (problems, stale) = (BTreeMap::new(), BTreeSet::new());
    let mut walk = Walk { inner, pack: &pack, good: Vec::new(), problems, stale, told: 0, tell };
    if matches!(ending, PackEnding::Closed { .. })
        && pack.is_dense()
        && let Some(problem) = dictionary_problem(&pack)
    {
        // The walk below finds the affected records.
        findings.harmless.push((pack.object.clone(), problem));
    }
    let read_data = read_data || !findings.harmless.is_empty();
    let mut expected = wanted.to_vec();
    match ending {
        PackEnding::Closed { entries, records_end } if read_data => {
            walk.check_index(&entries, records_end, &mut expected, &mut findings);
        }
        PackEnding::Closed { entries, .. } => {
            walk.good = entries;
            walk.check_derived(wanted);
        }
        PackEnding::Unfinished => {
            let skipped = walk.run(pack.first, len_bytes, wanted);
            let why = if skipped > 0 {
                format!("; {skipped} bytes hold no readable record and nothing refers to them")
            } else {
                String::new()
            };
            findings.notes.push(format!(
                "{}: unfinished, its writer was stopped or is still at work{why}",
                layout::pack(number)
            ));
        }
        PackEnding::Damaged(problem) => {
            walk.run(pack.first, len_bytes, wanted);
            let problem = format!("{problem}; the pages before it were read one by one instead");
            findings.harmless.push((pack.object.clone(), problem));
        }
    }
    findings.records = walk.good.len() as u64;
    findings.bad = walk.missing(expected);
    findings
}

/// What is wrong with the dictionary of a dense pack.
fn dictionary_problem(pack: &PackFile) -> Option<String> {
    pack.dictionary().unwrap_or_else(|error| Err(error.to_string())).err()
}

/// The findings about a pack that cannot be opened.
fn unreadable_pack(inner: &OpenStore, number: u32, wanted: &[u64], error: Error) -> Findings {
    let mut findings = Findings::default();
    let name = layout::pack(number);
    let (object, problem) = explain(inner, &name, error);
    if wanted.is_empty() {
        findings.notes.push(format!("{name}: unfinished ({problem}); nothing refers to it"));
    } else {
        let refs = wanted.iter().map(|at| PageRef(u64::from(number) << 40 | at)).collect();
        findings.bad.push(PackBounds { object, problem, refs, stale: false });
    }
    findings
}

/// Reads a pack record by record. After a bad one continues at the next known offset.
struct Walk<'a> {
    inner: &'a OpenStore,
    pack: &'a PackFile,
    good: Vec<PackEntry>,
    problems: BTreeMap<u64, String>,
    /// Of these: records whose bytes are correct.
    stale: BTreeSet<u64>,
    told: u64,
    tell: &'a mut dyn FnMut(u64),
}

impl Walk<'_> {
    /// Reads `start..end`. `resume` are the offsets, rising, of known and wanted records. Returns
    /// the number of skipped bytes that no offset in `resume` points to.
    fn run(&mut self, start: u64, end: u64, resume: &[u64]) -> u64 {
        let (mut at, mut skipped) = (start, 0);
        let pack = self.pack;
        loop {
            let Self { good, problems, stale, told, tell, .. } = self;
            let mut visit = |held: Result<PackEntry, (u64, Error)>| match held {
                Ok(entry) => {
                    good.push(entry);
                    if entry.offset() - *told > TELL_BYTES {
                        *told = entry.offset();
                        tell(*told);
                    }
                }
                Err((at, error)) => {
                    stale.insert(at);
                    problems.insert(at, problem_of(pack, at, error));
                }
            };
            let Some((stop, error)) = pack.walk(self.inner, at, end, &mut visit) else {
                return skipped;
            };
            let is_known = resume.binary_search(&stop).is_ok();
            self.problems.insert(stop, problem_of(pack, stop, error));
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

    /// Reads all records of a closed pack and compares them with its index. Adds the entries of the
    /// index to the `expected` offsets.
    fn check_index(
        &mut self,
        entries: &[PackEntry],
        records_end: u64,
        expected: &mut Vec<u64>,
        findings: &mut Findings,
    ) {
        let resume: Vec<u64> = entries.iter().map(PackEntry::offset).collect();
        self.run(self.pack.first, records_end, &resume);
        if self.problems.is_empty() && self.good != entries {
            let problem = "its index does not list the records that it holds".into();
            findings.harmless.push((self.pack.object.clone(), problem));
        }
        expected.extend(resume);
        expected.sort_unstable();
        expected.dedup();
    }

    /// The expected records that are not correct.
    fn missing(self, mut expected: Vec<u64>) -> Vec<PackBounds> {
        let Walk { pack, good, problems, stale, .. } = self;
        expected.retain(|at| good.binary_search_by_key(at, PackEntry::offset).is_err());
        let (whole, broken): (Vec<u64>, Vec<u64>) =
            expected.into_iter().partition(|at| stale.contains(at));
        let mut bad = group(pack, &broken, &problems, false);
        bad.extend(group(pack, &whole, &problems, true));
        bad
    }

    /// Reads the derived ones among the `wanted` records, with their references. The index of this
    /// pack does not show whether the references exist.
    fn check_derived(&mut self, wanted: &[u64]) {
        let is_asked = |entry: &PackEntry| {
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

/// The problem of the record at `at`. Names another object only if the error is about that.
fn problem_of(pack: &PackFile, at: u64, error: Error) -> String {
    match error {
        Error::Damaged { object, problem }
            if object == format!("{} at offset {at}", pack.object) =>
        {
            problem
        }
        other => other.to_string(),
    }
}

/// Joins bad records that follow each other and have the same problem.
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
