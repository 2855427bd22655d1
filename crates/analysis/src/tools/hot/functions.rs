//! The instructions that functions executed: in all, and in each interval.
//!
//! Code outside all functions, such as that of user programs, counts for address 0 without a name.

use crate::context::{MergeContext, Part};
use crate::error::Result;
use crate::execution_counts::{CodeSpan, ExecutionCounts, sum_counts};
use crate::result_file::{CsvFile, Hex};
use crate::symbols::SymbolTable;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The number of functions whose intervals are listed: the hottest of all intervals.
const BY_INTERVAL: usize = 32;

/// A function's address and name.
type Function<'a> = (u64, &'a str);

/// The functions by the instructions that they executed, the hottest first.
pub(super) struct HotFunctions<'a> {
    symbols: &'a SymbolTable,
    all: Vec<(Function<'a>, u64)>,
}

impl<'a> HotFunctions<'a> {
    /// Sums, for each function of `symbols`, the instructions that it executed according to
    /// `counts`.
    pub fn of(counts: &ExecutionCounts, symbols: &'a SymbolTable) -> Self {
        let sums = sum_functions(counts, symbols);
        let mut all: Vec<_> = sums.into_iter().collect();
        all.sort_unstable_by_key(|&(function, executed)| (Reverse(executed), function));
        Self { symbols, all }
    }

    /// Writes `hot-functions.csv` with the sums of the hottest functions, `top` at most. Returns
    /// its path. Error: the file cannot be written.
    pub fn write(&self, merge: &MergeContext, top: usize) -> Result<PathBuf> {
        let mut csv = CsvFile::create(&merge.out, "hot-functions.csv", "address,executed,symbol")?;
        for &((address, name), executed) in self.all.iter().take(top) {
            csv.row((Hex(address), executed, name))?;
        }
        csv.finish()
    }

    /// Writes `hot-functions-by-interval.csv`: the instructions that the hottest functions executed
    /// in each interval. The functions are the hottest of all intervals together, at most `top` and
    /// at most 32. Returns the path of the file.
    ///
    /// Errors: a part cannot be read; the file cannot be written.
    pub fn write_by_interval(&self, merge: &MergeContext, top: usize) -> Result<PathBuf> {
        let header = "interval,start_icount,instructions,address,executed,symbol";
        let mut csv = CsvFile::create(&merge.out, "hot-functions-by-interval.csv", header)?;
        for part in &merge.parts {
            let Part { interval, .. } = part;
            let counts = sum_counts(std::slice::from_ref(part))?;
            let instructions = counts.values().fold(0_u64, |sum, one| sum.saturating_add(*one));
            let sums = sum_functions(&counts, self.symbols);
            for &(function, _) in self.all.iter().take(top.min(BY_INTERVAL)) {
                let Some(&executed) = sums.get(&function) else { continue };
                let (start, (address, name)) = (interval.start.0, function);
                csv.row((interval.index, start, instructions, Hex(address), executed, name))?;
            }
        }
        csv.finish()
    }
}

/// The instructions that each function executed.
fn sum_functions<'a>(
    counts: &ExecutionCounts,
    symbols: &'a SymbolTable,
) -> BTreeMap<Function<'a>, u64> {
    let mut sums = BTreeMap::new();
    // Neighbours mostly belong to one function.
    let (mut last, mut sum) = (((0, ""), 0..0), 0_u64);
    for (&CodeSpan { pc, .. }, &times) in counts {
        if !last.1.contains(&pc) {
            add(&mut sums, last.0, std::mem::take(&mut sum));
            last = symbols.find(pc).map_or(((0, ""), 0..0), |one| {
                let reach = one.address..one.address.saturating_add(one.len_bytes);
                ((one.address, one.name), reach)
            });
        }
        sum = sum.saturating_add(times);
    }
    add(&mut sums, last.0, sum);
    sums
}

fn add<'a>(sums: &mut BTreeMap<Function<'a>, u64>, function: Function<'a>, executed: u64) {
    if executed > 0 {
        let sum = sums.entry(function).or_default();
        *sum = sum.saturating_add(executed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::context::{Icount, IcountInterval};
    use crate::execution_counts::{COLUMNS, KIND};
    use std::path::Path;
    use std::sync::Arc;

    #[test]
    fn the_sums_of_the_intervals_are_those_of_all() {
        let dir = tempfile::tempdir().unwrap();
        let map = b"1000 T first\n1100 t second\n1200 T third\n";
        let symbols = SymbolTable::parse(Path::new("System.map"), map, 0).unwrap();
        // pc, length, times
        let rows: [&[u64]; 2] = [
            &[0x500, 2, 9, 0x1000, 4, 1, 0x1004, 4, 2, 0x1100, 4, 50],
            &[0x10fc, 4, 100, 0x1150, 4, 3, 0x1200, 4, 7, 0x9000, 4, 1],
        ];
        let parts = (0..).zip(rows).map(|(index, rows)| {
            let start = Icount(u64::from(index) * 500);
            let interval = IcountInterval { index, start, end: Icount(start.0 + 500) };
            let part = Part { interval, dir: dir.path().to_owned() };
            keyframe_plugins::write_part(&part.file(KIND, "part"), KIND, COLUMNS, rows).unwrap();
            part
        });
        let out = dir.path().to_owned();
        let merge = MergeContext { parts: parts.collect(), out, guest_symbols: Arc::default() };
        let counts = sum_counts(&merge.parts).unwrap();
        let hot = HotFunctions::of(&counts, &symbols);
        let text = |path| std::fs::read_to_string(path).unwrap();
        assert_eq!(
            text(hot.write(&merge, 3).unwrap()),
            "address,executed,symbol\n0x1000,103,first\n0x1100,53,second\n0x0,10,\n"
        );
        assert_eq!(
            text(hot.write_by_interval(&merge, 10).unwrap()),
            "interval,start_icount,instructions,address,executed,symbol\n\
             0,0,62,0x1000,3,first\n0,0,62,0x1100,50,second\n0,0,62,0x0,9,\n\
             1,500,111,0x1000,100,first\n1,500,111,0x1100,3,second\n1,500,111,0x0,1,\n\
             1,500,111,0x1200,7,third\n"
        );
    }
}
