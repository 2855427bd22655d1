//! Coverage as lcov's tracefile (geninfo(1)), which `genhtml` and editors read.
//!
//! ```text
//!   with DWARF                                without (System.map, an ELF file without it)
//!   SF:/usr/src/linux/kernel/fork.c           SF:/boot/System.map          the symbol file
//!   FN:2553,kernel_clone                      FN:4711,kernel_clone         line or symbol number
//!   FNDA:12,kernel_clone                      FNDA:12,kernel_clone
//!   DA:2570,12
//! ```
//!
//! A line's count is the highest count of its instructions. A function's count is that of its first
//! instruction, and at least one if any of its instructions ran. All lines and functions are
//! listed, so that shares refer to all code.

use crate::error::Result;
use crate::execution_counts::ExecutionCounts;
use crate::source_lines::{SourceLine, SourceLines};
use crate::symbols::{Symbol, SymbolTable};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Arguments;

/// The totals of a tracefile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CoverageTotals {
    pub files: u64,
    pub lines: u64,
    pub lines_run: u64,
    pub functions: u64,
    pub functions_run: u64,
}

/// How often a function ran.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct FunctionCount<'a> {
    line: u64,
    name: &'a str,
    times: u64,
}

/// The record of a source file.
#[derive(Default)]
struct SourceRecord<'a> {
    functions: Vec<FunctionCount<'a>>,
    /// Counts by line.
    lines: BTreeMap<u32, u64>,
}

/// Writes all records; `line` writes a line of text. `symbols_path` takes the place of a source
/// file if there are no lines.
pub(crate) fn write(
    ran: &ExecutionCounts,
    symbols: &SymbolTable,
    lines: &SourceLines,
    symbols_path: &str,
    line: &mut dyn FnMut(Arguments<'_>) -> Result<()>,
) -> Result<CoverageTotals> {
    let mut by_line: BTreeMap<SourceLine, u64> = BTreeMap::new();
    let mut by_function: BTreeMap<u64, u64> = BTreeMap::new();
    for (instruction, &times) in ran {
        let pc = instruction.pc;
        if let Some(found) = lines.find(pc) {
            let most = by_line.entry(found).or_default();
            *most = times.max(*most);
        }
        if let Some(found) = symbols.find(pc) {
            let least = if found.address == pc { times } else { times.min(1) };
            let most = by_function.entry(found.address).or_default();
            *most = least.max(*most);
        }
    }
    let records = records(symbols, lines, &by_line, &by_function);
    let mut sums = CoverageTotals::default();
    line(format_args!("TN:keyframe"))?;
    for (number, record) in &records {
        let path = lines.files().get(*number).map_or(symbols_path, String::as_str);
        line(format_args!("SF:{path}"))?;
        sums.files += 1;
        write_record(record, &mut sums, line)?;
    }
    Ok(sums)
}

/// The records by index of the source file; 0 for all functions if there are no lines.
fn records<'a>(
    symbols: &'a SymbolTable,
    lines: &SourceLines,
    by_line: &BTreeMap<SourceLine, u64>,
    by_function: &BTreeMap<u64, u64>,
) -> BTreeMap<usize, SourceRecord<'a>> {
    let mut records: BTreeMap<usize, SourceRecord<'a>> = BTreeMap::new();
    for one in lines.all() {
        let record = records.entry(one.file as usize).or_default();
        record.lines.entry(one.line).or_insert_with(|| by_line.get(&one).copied().unwrap_or(0));
    }
    for function in symbols.iter() {
        let times = by_function.get(&function.address).copied().unwrap_or(0);
        // A function without lines, for example of assembly, belongs to no source file.
        let position =
            if lines.is_empty() { Some((0, function.number)) } else { source(lines, &function) };
        if let Some((file, line)) = position {
            let function = FunctionCount { line: line.max(1), name: function.name, times };
            records.entry(file).or_default().functions.push(function);
        }
    }
    records
}

fn source(lines: &SourceLines, function: &Symbol<'_>) -> Option<(usize, u64)> {
    lines.find(function.address).map(|line| (line.file as usize, line.line.into()))
}

fn write_record(
    record: &SourceRecord<'_>,
    sums: &mut CoverageTotals,
    line: &mut dyn FnMut(Arguments<'_>) -> Result<()>,
) -> Result<()> {
    let mut functions = record.functions.clone();
    functions.sort_unstable();
    // Readers tell functions of a file apart by name; compilers give parts of one, and static ones
    // of inlined files, the same.
    let mut met = BTreeSet::new();
    functions.retain(|function| met.insert((function.name, function.line)));
    let mut names = BTreeMap::new();
    let named: Vec<_> = functions
        .iter()
        .map(|&FunctionCount { line: at, name, times }| {
            let again: &mut u64 = names.entry(name).or_default();
            *again += 1;
            let name = name.replace(|letter: char| letter == ',' || letter.is_control(), ";");
            (at, if *again == 1 { name } else { format!("{name}#{again}") }, times)
        })
        .collect();
    for (at, name, _) in &named {
        line(format_args!("FN:{at},{name}"))?;
    }
    for (_, name, times) in &named {
        line(format_args!("FNDA:{times},{name}"))?;
    }
    let run = named.iter().filter(|(_, _, times)| *times > 0).count();
    line(format_args!("FNF:{}", named.len()))?;
    line(format_args!("FNH:{run}"))?;
    sums.functions += named.len() as u64;
    sums.functions_run += run as u64;
    for (at, times) in &record.lines {
        line(format_args!("DA:{at},{times}"))?;
    }
    let run = record.lines.values().filter(|times| **times > 0).count();
    line(format_args!("LF:{}", record.lines.len()))?;
    line(format_args!("LH:{run}"))?;
    sums.lines += record.lines.len() as u64;
    sums.lines_run += run as u64;
    line(format_args!("end_of_record"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::execution_counts::CodeSpan;
    use crate::source_lines::tests::program;
    use std::path::Path;

    /// Counts from addresses, lengths and how often the instructions ran.
    fn counts<const N: usize>(instructions: [(u64, u64, u64); N]) -> ExecutionCounts {
        instructions.map(|(pc, len_bytes, times)| (CodeSpan { pc, len_bytes }, times)).into()
    }

    fn written(
        ran: &ExecutionCounts,
        symbols: &SymbolTable,
        lines: &SourceLines,
        path: &str,
    ) -> (Vec<String>, CoverageTotals) {
        let mut all = Vec::new();
        let sums = write(ran, symbols, lines, path, &mut |line| {
            all.push(line.to_string());
            Ok(())
        });
        (all, sums.unwrap())
    }

    #[test]
    fn lines_and_functions_of_a_compiled_program_are_counted() {
        let dir = tempfile::tempdir().unwrap();
        let (path, bytes, named) = program(dir.path(), &["-g"]);
        let (symbols, lines) = (
            SymbolTable::parse(&path, &bytes, 0).unwrap(),
            SourceLines::parse(&path, &bytes, 0).unwrap(),
        );
        // main ran 3 times, twice only after its first instruction, unused never.
        let ran =
            counts([(named["main"], 1, 3), (named["main"] + 1, 3, 7), (named["twice"] + 1, 3, 5)]);
        let (all, sums) = written(&ran, &symbols, &lines, "");
        assert!(all[1].starts_with("SF:/") && all[1].ends_with("/some.c"), "{all:?}");
        let expected = "FN:2,twice FN:7,unused FN:12,main FNDA:1,twice FNDA:0,unused FNDA:3,main FNF:3 FNH:2 DA:2,5 DA:3,0 DA:4,0 \
            DA:7,0 DA:8,0 DA:9,0 DA:12,7 DA:13,0 DA:14,0 DA:15,0 DA:16,0 LF:11 LH:2 end_of_record";
        assert_eq!(all[2..].join(" "), expected);
        assert_eq!(
            sums,
            CoverageTotals { files: 1, lines: 11, lines_run: 2, functions: 3, functions_run: 2 }
        );
    }

    #[test]
    fn without_lines_functions_are_counted_in_the_file_of_symbols() {
        let text =
            b"1000 T first\n1010 D data\n1020 t same\n1030 t same\n1040 T odd,name\n1050 T last\n";
        let symbols = SymbolTable::parse(Path::new("System.map"), text, 0).unwrap();
        let ran = counts([(0x1004, 4, 9), (0x1030, 2, 4), (0x9000, 1, 1)]);
        let (all, sums) = written(&ran, &symbols, &SourceLines::default(), "System.map");
        let expected = "TN:keyframe SF:System.map FN:1,first FN:3,same FN:4,same#2 FN:5,odd;name FN:6,last FNDA:1,first FNDA:0,same \
            FNDA:4,same#2 FNDA:0,odd;name FNDA:0,last FNF:5 FNH:2 LF:0 LH:0 end_of_record";
        assert_eq!(all.join(" "), expected);
        assert_eq!(
            sums,
            CoverageTotals { files: 1, lines: 0, lines_run: 0, functions: 5, functions_run: 2 }
        );
    }
}
