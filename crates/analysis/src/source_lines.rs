//! Source lines by address, from an ELF file with DWARF (`cc -g`, CONFIG_DEBUG_INFO).
//!
//! ```text
//!   .debug_line                                      ranges
//!   0x1000  file 1, line 10                          [0x1000, 0x1004) 1:10
//!   0x1004  file 2, line 3 (inlined)                 [0x1004, 0x1009) 2:3
//!   0x1009  file 1, line 11                          [0x1009, 0x1010) 1:11
//!   0x1010  end
//! ```
//!
//! Inlined code belongs to the line where it was written. Code that the linker dropped lies in no
//! code section, and is ignored.
//!
//! Not supported: debug information in separate files (split DWARF, a link to a `.debug` file).
//! Name that file instead.

use crate::error::{Error, Result};
use gimli::{EndianSlice, RunTimeEndian};
use object::{Object, ObjectSection, SectionKind};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

/// The most ranges: a kernel with all drivers has about ten million.
const RANGES_MAX: usize = 1 << 27;

type Bytes<'a> = EndianSlice<'a, RunTimeEndian>;

/// A range of code of one line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct LineRange {
    start: u64,
    end: u64,
    file: u32,
    line: u32,
}

/// A line of a source file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SourceLine {
    /// The index into [`SourceLines::files`].
    pub file: u32,
    /// The line, from 1 on.
    pub line: u32,
}

/// Source lines by address.
#[derive(Clone, Debug, Default)]
pub struct SourceLines {
    files: Vec<String>,
    ranges: Vec<LineRange>,
}

impl SourceLines {
    /// Reads the lines of the ELF file `bytes`, which was read from `path`. The result is empty if
    /// the file has no debug information. `slide` is added to each address. Error:
    /// [`Error::Damaged`] if the file or its debug information is invalid.
    pub fn parse(path: &Path, bytes: &[u8], slide: u64) -> Result<Self> {
        let damaged = |problem: String| Error::Damaged {
            path: path.to_owned(),
            place: "debug information (DWARF)".into(),
            problem: format!("{problem}; strip it (strip -g) to use functions only"),
        };
        let parsed = object::File::parse(bytes).map_err(|error| damaged(error.to_string()))?;
        let mut lines = Self::from_elf(&parsed).map_err(|error| damaged(error.to_string()))?;
        for range in &mut lines.ranges {
            (range.start, range.end) =
                (range.start.wrapping_add(slide), range.end.wrapping_add(slide));
        }
        lines.ranges.sort_unstable();
        lines.ranges.dedup();
        Ok(lines)
    }

    fn from_elf(
        parsed: &object::File<'_>,
    ) -> std::result::Result<Self, Box<dyn std::error::Error>> {
        let endian =
            if parsed.is_little_endian() { RunTimeEndian::Little } else { RunTimeEndian::Big };
        let sections = gimli::DwarfSections::load(|id| match parsed.section_by_name(id.name()) {
            Some(section) => section.uncompressed_data(),
            None => Ok(Cow::Borrowed(&[][..])),
        })?;
        let dwarf = sections.borrow(|section| EndianSlice::new(section, endian));
        let code: Vec<_> = parsed
            .sections()
            .filter(|section| section.kind() == SectionKind::Text)
            .map(|section| section.address()..section.address().saturating_add(section.size()))
            .collect();
        let mut all = LineCollector { files: BTreeMap::new(), ranges: Vec::new(), code };
        let mut units = dwarf.units();
        while let Some(header) = units.next()? {
            all.add(&dwarf, &dwarf.unit(header)?)?;
        }
        Ok(all.finish())
    }

    /// Returns whether there are no lines.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Returns the paths of the source files, in alphabetical order.
    pub fn files(&self) -> &[String] {
        &self.files
    }

    /// Returns all lines that have code, once for each of their ranges.
    pub fn all(&self) -> impl Iterator<Item = SourceLine> {
        self.ranges.iter().map(|range| SourceLine { file: range.file, line: range.line })
    }

    /// Returns the source line of the code at `address`; `None` if no line covers the address.
    pub fn find(&self, address: u64) -> Option<SourceLine> {
        let next = self.ranges.partition_point(|range| range.start <= address);
        let range = self.ranges.get(next.checked_sub(1)?)?;
        (address < range.end).then_some(SourceLine { file: range.file, line: range.line })
    }
}

/// Collects ranges while files are not in order yet.
struct LineCollector {
    /// The index of each file, in the order in which they were met.
    files: BTreeMap<String, u32>,
    ranges: Vec<LineRange>,
    /// The address ranges of code sections.
    code: Vec<Range<u64>>,
}

impl LineCollector {
    fn add(
        &mut self,
        dwarf: &gimli::Dwarf<Bytes<'_>>,
        unit: &gimli::Unit<Bytes<'_>>,
    ) -> std::result::Result<(), Box<dyn std::error::Error>> {
        let Some(program) = unit.line_program.clone() else { return Ok(()) };
        let mut numbers: BTreeMap<u64, u32> = BTreeMap::new();
        let mut rows = program.rows();
        let mut before: Option<LineRange> = None;
        while let Some((header, row)) = rows.next_row()? {
            if let Some(range) = before.take() {
                self.push(LineRange { end: row.address(), ..range })?;
            }
            let (false, Some(line)) = (row.end_sequence(), row.line()) else { continue };
            let index = row.file_index();
            let file = if let Some(&file) = numbers.get(&index) {
                file
            } else {
                let Some(entry) = row.file(header) else { continue };
                let next = u32::try_from(self.files.len())?;
                let file = *self.files.entry(path_of(dwarf, unit, header, entry)?).or_insert(next);
                numbers.insert(index, file);
                file
            };
            before = Some(LineRange {
                start: row.address(),
                end: 0,
                file,
                line: u32::try_from(line.get())?,
            });
        }
        Ok(())
    }

    fn push(&mut self, range: LineRange) -> std::result::Result<(), String> {
        let is_code = self
            .code
            .iter()
            .any(|section| section.contains(&range.start) && range.end <= section.end);
        if !is_code || range.start >= range.end {
            return Ok(());
        }
        let count = self.ranges.len();
        match self.ranges.last_mut() {
            Some(last)
                if last.end == range.start
                    && (last.file, last.line) == (range.file, range.line) =>
            {
                last.end = range.end;
            }
            _ if count >= RANGES_MAX => {
                return Err(format!("more than {RANGES_MAX} ranges of code"));
            }
            _ => self.ranges.push(range),
        }
        Ok(())
    }

    /// Numbers the files in alphabetical order.
    fn finish(self) -> SourceLines {
        let mut order = vec![0; self.files.len()];
        for (place, &number) in (0..).zip(self.files.values()) {
            order[number as usize] = place;
        }
        let mut ranges = self.ranges;
        for range in &mut ranges {
            range.file = order[range.file as usize];
        }
        SourceLines { files: self.files.into_keys().collect(), ranges }
    }
}

/// The path of a source file: compilation directory, directory, name. An absolute component
/// replaces those before it.
fn path_of(
    dwarf: &gimli::Dwarf<Bytes<'_>>,
    unit: &gimli::Unit<Bytes<'_>>,
    header: &gimli::LineProgramHeader<Bytes<'_>>,
    entry: &gimli::FileEntry<Bytes<'_>>,
) -> gimli::Result<String> {
    let mut path = unit.comp_dir.map_or_else(String::new, |dir| dir.to_string_lossy().into_owned());
    let directory = entry.directory(header).map(|dir| dwarf.attr_string(unit, dir)).transpose()?;
    for part in directory.into_iter().chain([dwarf.attr_string(unit, entry.path_name())?]) {
        let part = part.to_string_lossy();
        if part.starts_with('/') || path.is_empty() {
            path = part.into_owned();
        } else if !part.is_empty() {
            path = format!("{path}/{part}");
        }
    }
    // A line feed would begin another record of a tracefile.
    Ok(path.replace(|letter: char| letter.is_control(), " "))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use object::ObjectSymbol;
    use std::path::PathBuf;
    use std::process::Command;

    pub(crate) const SOURCE: &str = "\
static int twice(int n)
{
\treturn n + n;
}

int unused(int n)
{
\treturn n - 1;
}

int main(int argc, char **argv)
{
\tif (argc > 100)
\t\treturn unused(argc);
\treturn twice(argc);
}
";

    /// Compiles [`SOURCE`]; returns the path, the contents and the addresses of the functions.
    pub(crate) fn program(
        dir: &Path,
        options: &[&str],
    ) -> (PathBuf, Vec<u8>, BTreeMap<String, u64>) {
        let (source, path) = (dir.join("some.c"), dir.join("some"));
        std::fs::write(&source, SOURCE).unwrap();
        let mut cc = Command::new("cc");
        cc.args(["-O0", "-no-pie", "-o"]).arg(&path).args(options).arg("some.c").current_dir(dir);
        assert!(cc.status().expect("a C compiler").success());
        let bytes = std::fs::read(&path).unwrap();
        let parsed = object::File::parse(&*bytes).unwrap();
        let named =
            parsed.symbols().map(|one| (one.name().unwrap().to_owned(), one.address())).collect();
        (path, bytes, named)
    }

    #[test]
    fn the_lines_of_a_compiled_program_are_found() {
        let dir = tempfile::tempdir().unwrap();
        for options in [
            &["-g"][..],
            &["-gdwarf-4"],
            &["-g", "-gz=zlib"],
            &["-g", "-ffunction-sections", "-Wl,--gc-sections"],
        ] {
            let (path, bytes, named) = program(dir.path(), options);
            let lines = SourceLines::parse(&path, &bytes, 0x1000).unwrap();
            let [file] = lines.files() else { panic!("{options:?}: {:?}", lines.files()) };
            assert!(file.ends_with("/some.c"), "{file}");
            let at = |name: &str| lines.find(named[name] + 0x1000).map(|line| line.line);
            assert_eq!((at("twice"), at("main")), (Some(2), Some(12)), "{options:?}");
            assert_eq!(lines.find(0x10), None);
            let mut all: Vec<_> = lines.all().map(|line| line.line).collect();
            all.sort_unstable();
            all.dedup();
            assert_eq!(all, [2, 3, 4, 7, 8, 9, 12, 13, 14, 15, 16], "{options:?}");
        }
    }

    #[test]
    fn a_program_without_debug_information_has_no_lines_and_damage_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let (path, bytes, _) = program(dir.path(), &["-g0"]);
        let lines = SourceLines::parse(&path, &bytes, 0).unwrap();
        // A distribution's start files may have debug information of their own.
        assert!(lines.files().iter().all(|file| !file.ends_with("some.c")));
        let (path, bytes, _) = program(dir.path(), &["-g"]);
        let (mut refused, mut passed) = (0, 0);
        for at in (0..bytes.len()).step_by(7) {
            let mut broken = bytes.clone();
            broken[at] = !broken[at];
            match SourceLines::parse(&path, &broken, 0) {
                Ok(_) => passed += 1,
                Err(_) => refused += 1,
            }
        }
        assert!(refused > 0 && passed > 0, "{refused} refused, {passed} passed");
    }
}
