//! Tools of third parties: any QEMU plugin with a manifest that says how it is called and how its
//! parts are merged.
//!
//! ```text
//!   name = "opcodes"
//!   about = "Instructions by first byte"
//!   arguments = ["out={part}"]                    {part} the part's file, {dir} its directory, {arg:NAME} a --tool-arg
//!   result = "opcodes.csv"
//!   merge = "sum-columns"                         or "concat", or { command = ["sort", "-m"] }
//!   [plugin]
//!   interface-1 = "opcodes-1.so"                  beside the manifest, unless absolute
//!   interface-4 = "opcodes-4.so"
//! ```
//!
//! The plugin writes the part when QEMU exits; it knows nothing of cuts, so each of its runs has
//! one interval.

use crate::context::{MergeContext, Part, RunContext, Summary, part_file};
use crate::csv::Csv;
use crate::error::{Error, Result, file};
use crate::plugin::Interface;
use crate::tools::{Running, Tool, check_cuts, option};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Largest manifest.
const MANIFEST_BYTES_MAX: u64 = 1 << 16;
/// Longest line of a part that is summed, and most different keys.
const LINE_BYTES_MAX: u64 = 1 << 16;
const KEYS_MAX: usize = 1 << 24;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Plugin {
    #[serde(rename = "interface-1")]
    interface_1: Option<PathBuf>,
    #[serde(rename = "interface-4")]
    interface_4: Option<PathBuf>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Merge {
    /// One part behind the other.
    Concat,
    /// A header, then a key and numbers: numbers of equal keys are added up, keys in order.
    SumColumns,
    /// A program: the parts' paths are added to its words; its standard output is the result.
    Command(Vec<String>),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    name: String,
    #[serde(default)]
    about: String,
    #[serde(default)]
    arguments: Vec<String>,
    result: String,
    merge: Merge,
    plugin: Plugin,
}

/// A tool that a manifest describes.
#[derive(Debug)]
pub struct Foreign {
    manifest: Manifest,
    dir: PathBuf,
    given: BTreeMap<String, String>,
}

impl Foreign {
    /// Reads the manifest at `path`; `arguments` are the `--tool-arg`s.
    pub fn read(path: &Path, arguments: &[String]) -> Result<Self> {
        let damaged = |problem: String| Error::Damaged {
            path: path.to_owned(),
            place: "manifest".into(),
            problem,
        };
        let mut text = String::new();
        let input = File::open(path).map_err(file("opening the manifest", path))?;
        input.take(MANIFEST_BYTES_MAX).read_to_string(&mut text).map_err(file("reading", path))?;
        let manifest: Manifest =
            toml::from_str(&text).map_err(|error| damaged(error.to_string()))?;
        for name in [&manifest.name, &manifest.result] {
            let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            if name.is_empty() || name.starts_with('.') || !name.chars().all(plain) {
                return Err(damaged(format!(
                    "{name:?} is no plain name of letters, digits and -_."
                )));
            }
        }
        let mut given = BTreeMap::new();
        for text in arguments {
            let asked = |name: &str| {
                manifest.arguments.iter().any(|one| one.contains(&format!("{{arg:{name}}}")))
            };
            match text.split_once('=') {
                Some((name, value)) if asked(name) => {
                    given.insert(name.to_owned(), value.to_owned())
                }
                _ => {
                    let problem =
                        "write NAME=VALUE, with a name that its manifest has as {arg:NAME}".into();
                    return Err(Error::Argument {
                        tool: manifest.name,
                        argument: text.clone(),
                        problem,
                    });
                }
            };
        }
        // A plain name has an empty parent, and QEMU would look for its plugin where the system has
        // libraries.
        let dir = path
            .parent()
            .filter(|dir| !dir.as_os_str().is_empty())
            .unwrap_or(Path::new("."))
            .to_owned();
        Ok(Self { manifest, dir, given })
    }

    /// One line.
    pub fn about(&self) -> &str {
        &self.manifest.about
    }

    fn plugin(&self, interface: Interface) -> Result<PathBuf> {
        let plugin = match interface {
            Interface::V1 => &self.manifest.plugin.interface_1,
            Interface::V4 => &self.manifest.plugin.interface_4,
        };
        let plugin = plugin.as_ref().ok_or_else(|| Error::Plugin {
            operation: "choosing it",
            problem: format!(
                "{} has none for {interface}; build it and name it as interface-{} in the manifest",
                self.manifest.name,
                interface.number()
            ),
        })?;
        Ok(self.dir.join(plugin))
    }

    fn argument(&self, text: &str, part: &Path, dir: &Path) -> Result<(String, String)> {
        let mut text = text
            .replace("{part}", &part.display().to_string())
            .replace("{dir}", &dir.display().to_string());
        for (name, value) in &self.given {
            text = text.replace(&format!("{{arg:{name}}}"), value);
        }
        let wrong = |problem: &str| Error::Argument {
            tool: self.manifest.name.clone(),
            argument: text.clone(),
            problem: problem.into(),
        };
        if text.contains("{arg:") {
            return Err(wrong("it must be given with --tool-arg"));
        }
        let (name, value) =
            text.split_once('=').ok_or_else(|| wrong("write it as name=value in the manifest"))?;
        Ok((name.to_owned(), value.to_owned()))
    }
}

struct Run {
    context: RunContext,
    option: String,
    part: PathBuf,
    cuts: usize,
}

impl Tool for Foreign {
    fn name(&self) -> &str {
        &self.manifest.name
    }

    /// Not known.
    fn reads_ram(&self) -> bool {
        true
    }

    fn can_cut(&self) -> bool {
        false
    }

    fn begin(&self, run: &RunContext) -> Result<Box<dyn Running>> {
        let &[interval] = run.intervals.as_slice() else {
            return Err(Error::Cuts { intervals: 1, cuts: run.intervals.len() });
        };
        let plugin = self.plugin(run.interface)?;
        let part = part_file(&run.dir, interval.index, &self.manifest.name, "part");
        let arguments: Result<Vec<_>> = self
            .manifest
            .arguments
            .iter()
            .map(|text| self.argument(text, &part, &run.dir))
            .collect();
        let arguments = arguments?;
        let arguments: Vec<_> =
            arguments.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        let option = option(&plugin, &arguments);
        Ok(Box::new(Run { context: run.clone(), option, part, cuts: 0 }))
    }

    fn merge(&self, merge: &MergeContext) -> Result<Summary> {
        let parts: Vec<PathBuf> =
            merge.parts.iter().map(|part| part.file(&self.manifest.name, "part")).collect();
        let path = merge.out.join(&self.manifest.result);
        match &self.manifest.merge {
            Merge::Concat => concat(&parts, &path)?,
            Merge::SumColumns => sum_columns(&parts, merge, &self.manifest.result)?,
            Merge::Command(words) => command(words, &parts, &path)?,
        }
        let lines = vec![format!("{} parts merged", parts.len())];
        Ok(Summary { lines, files: vec![path] })
    }
}

impl Running for Run {
    fn option(&self) -> String {
        self.option.clone()
    }

    fn cut(&mut self) -> Result<()> {
        self.cuts += 1;
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<Vec<Part>> {
        check_cuts(&self.context, self.cuts)?;
        // Asked for before it is promised: the plugin is not ours.
        std::fs::metadata(&self.part)
            .map_err(file("looking for what the plugin should have written,", &self.part))?;
        Ok(self.context.parts())
    }
}

fn concat(parts: &[PathBuf], path: &Path) -> Result<()> {
    let mut out = File::create(path).map_err(file("creating", path))?;
    for part in parts {
        let mut input = File::open(part).map_err(file("opening", part))?;
        std::io::copy(&mut input, &mut out).map_err(file("copying", part))?;
    }
    Ok(())
}

fn sum_columns(parts: &[PathBuf], merge: &MergeContext, result: &str) -> Result<()> {
    let mut header: Option<String> = None;
    let mut sums: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    for part in parts {
        let mut input = BufReader::new(File::open(part).map_err(file("opening", part))?);
        let mut number = 0;
        while let Some(line) = next_line(&mut input, part)? {
            number += 1;
            let damaged = |problem: &str| Error::Damaged {
                path: part.clone(),
                place: format!("line {number}"),
                problem: problem.into(),
            };
            if number == 1 {
                if *header.get_or_insert_with(|| line.clone()) != line {
                    return Err(damaged("another header than the first part's"));
                }
                continue;
            }
            let mut cells = line.split(',');
            let key = cells.next().unwrap_or_default();
            let values: Option<Vec<u64>> = cells.map(|cell| cell.trim().parse().ok()).collect();
            let values =
                values.ok_or_else(|| damaged("behind the key, not all are whole numbers"))?;
            add(&mut sums, key, &values).map_err(damaged)?;
        }
    }
    let mut csv = Csv::create(&merge.out, result, &header.unwrap_or_default())?;
    for (key, values) in &sums {
        let mut line = key.clone();
        for value in values {
            let _ = write!(line, ",{value}");
        }
        csv.line(format_args!("{line}"))?;
    }
    csv.finish().map(drop)
}

fn add(
    sums: &mut BTreeMap<String, Vec<u64>>,
    key: &str,
    values: &[u64],
) -> Result<(), &'static str> {
    if let Some(sum) = sums.get_mut(key) {
        if sum.len() != values.len() {
            return Err("another number of columns than this key had before");
        }
        for (sum, value) in sum.iter_mut().zip(values) {
            *sum = sum.checked_add(*value).ok_or("a sum beyond 64 bits")?;
        }
        return Ok(());
    }
    if sums.len() >= KEYS_MAX {
        return Err("more than 16 million different keys");
    }
    sums.insert(key.to_owned(), values.to_vec());
    Ok(())
}

fn next_line(input: &mut BufReader<File>, path: &Path) -> Result<Option<String>> {
    let mut line = String::new();
    input.by_ref().take(LINE_BYTES_MAX).read_line(&mut line).map_err(file("reading", path))?;
    if line.len() as u64 >= LINE_BYTES_MAX {
        let problem = format!("longer than {LINE_BYTES_MAX} bytes");
        return Err(Error::Damaged { path: path.to_owned(), place: "a line".into(), problem });
    }
    Ok((!line.is_empty()).then(|| line.trim_end().to_owned()))
}

fn command(words: &[String], parts: &[PathBuf], path: &Path) -> Result<()> {
    let program = words.first().cloned().unwrap_or_default();
    let failed = |problem: String| Error::MergeCommand { program: program.clone(), problem };
    let out = File::create(path).map_err(file("creating", path))?;
    let status = Command::new(&program)
        .args(&words[words.len().min(1)..])
        .args(parts)
        .stdin(Stdio::null())
        .stdout(out)
        .status()
        .map_err(|error| failed(error.to_string()))?;
    if status.success() { Ok(()) } else { Err(failed(status.to_string())) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::context::{Icount, Interval};

    fn foreign(dir: &Path, merge: &str) -> Result<Foreign> {
        let text = format!(
            "name = \"t\"\narguments = [\"out={{part}}\", \"n={{arg:n}}\"]\nresult = \"t.csv\"\nmerge = {merge}\n\
            [plugin]\ninterface-1 = \"t.so\"\n"
        );
        std::fs::write(dir.join("t.toml"), text).unwrap();
        Foreign::read(&dir.join("t.toml"), &["n=7".into()])
    }

    fn merged(merge: &str, parts: &[&str]) -> Result<String> {
        let dir = tempfile::tempdir().unwrap();
        let tool = foreign(dir.path(), merge)?;
        let parts = parts.iter().enumerate().map(|(index, text)| {
            let interval = Interval { index: index as u32, start: Icount(0), end: Icount(1) };
            let part = Part { interval, dir: dir.path().to_owned() };
            std::fs::write(part.file("t", "part"), text).unwrap();
            part
        });
        tool.merge(&MergeContext { parts: parts.collect(), out: dir.path().to_owned() })?;
        Ok(std::fs::read_to_string(dir.path().join("t.csv")).unwrap())
    }

    #[test]
    fn each_rule_merges() {
        assert_eq!(merged("\"concat\"", &["a\n", "b\n"]).unwrap(), "a\nb\n");
        let sums =
            merged("\"sum-columns\"", &["k,x,y\nb,1,2\na,3,4\n", "k,x,y\nb,10,20\n"]).unwrap();
        assert_eq!(sums, "k,x,y\na,3,4\nb,11,22\n");
        assert_eq!(
            merged("{ command = [\"sort\", \"-m\"] }", &["b\n", "a\nc\n"]).unwrap(),
            "a\nb\nc\n"
        );
        assert!(merged("{ command = [\"false\"] }", &["a"]).is_err());
        assert!(merged("{ command = [] }", &["a"]).is_err());
    }

    #[test]
    fn parts_that_do_not_fit_are_refused() {
        let big = format!("k,x\na,{}\n", u64::MAX);
        let cases: [&[&str]; 5] = [
            &["k,x\na,1\n", "k,y\na,1\n"],
            &["k,x\na,b\n"],
            &["k,x\na,1\na,1,2\n"],
            &["k,x\na,-1\n"],
            &[&big, "k,x\na,1\n"],
        ];
        for parts in cases {
            assert!(merged("\"sum-columns\"", parts).is_err(), "{parts:?}");
        }
        let long = "x".repeat(LINE_BYTES_MAX as usize + 1);
        assert!(merged("\"sum-columns\"", &[&long]).is_err());
    }

    #[test]
    fn a_manifest_that_leads_elsewhere_or_lacks_something_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.toml");
        let rest = "merge = \"concat\"\n[plugin]\n";
        for text in [
            format!("name = \"../x\"\nresult = \"r\"\n{rest}"),
            format!("name = \"x\"\nresult = \"a/b\"\n{rest}"),
            format!("name = \"x\"\n{rest}"),
            format!("name = \"x\"\nresult = \"r\"\nodd = 1\n{rest}"),
            "name = \"x\"\nresult = \"r\"\nmerge = \"other\"\n[plugin]\n".to_owned(),
        ] {
            std::fs::write(&path, &text).unwrap();
            assert!(Foreign::read(&path, &[]).is_err(), "{text}");
        }
        let tool = foreign(dir.path(), "\"concat\"").unwrap();
        assert!(
            Foreign::read(&dir.path().join("t.toml"), &["m=1".into()]).is_err(),
            "an argument it has not"
        );
        assert!(tool.plugin(Interface::V4).unwrap_err().to_string().contains("interface-4"));
        let made = tool.argument("out={part}", Path::new("/p/0.part"), Path::new("/p")).unwrap();
        assert_eq!(made, ("out".to_owned(), "/p/0.part".to_owned()));
        assert_eq!(tool.argument("n={arg:n}", Path::new(""), Path::new("")).unwrap().1, "7");
    }
}
