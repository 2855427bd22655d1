//! Third-party tools: any QEMU plugin with a manifest that says how to call it and how to merge
//! its parts.
//!
//! ```text
//!   name = "opcodes"
//!   about = "Instructions by first byte"
//!   arguments = ["out={part}"]          {part} the part's file, {dir} its directory,
//!                                       {arg:NAME} a --tool-arg
//!   result = "opcodes.csv"
//!   merge = "sum-columns"               or "concat", or { command = ["sort", "-m"] }
//!   [plugin]
//!   interface-1 = "opcodes-1.so"        relative to the manifest
//!   interface-4 = "opcodes-4.so"
//! ```
//!
//! The plugin writes the part when QEMU exits. It knows nothing of cuts, so each run has one
//! interval.

use crate::context::{
    IcountInterval, MergeContext, Part, RunContext, RunIntervals, ToolSummary, part_file,
};
use crate::error::{Error, Result, file};
use crate::plugin::PluginInterface;
use crate::result_file::CsvFile;
use crate::tools::{Tool, ToolRun, plugin_option};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The largest manifest, in bytes.
const MANIFEST_BYTES_MAX: u64 = 1 << 16;
/// The longest line of a part that is summed, in bytes.
const LINE_BYTES_MAX: u64 = 1 << 16;
/// The most different keys of a sum.
const KEYS_MAX: usize = 1 << 24;

/// The plugin files of a manifest, by interface.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PluginFiles {
    #[serde(rename = "interface-1")]
    v1: Option<PathBuf>,
    #[serde(rename = "interface-4")]
    v4: Option<PathBuf>,
    #[serde(rename = "interface-7")]
    v7: Option<PathBuf>,
}

/// How parts are merged.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum MergeRule {
    /// Appends the parts in order.
    Concat,
    /// Sums the numbers of equal keys: a header line, then lines of a key and numbers.
    SumColumns,
    /// Runs a program with the parts' paths as further arguments; its standard output is the
    /// result.
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
    merge: MergeRule,
    plugin: PluginFiles,
}

/// A tool that a manifest describes.
#[derive(Debug)]
pub struct ThirdPartyTool {
    manifest: Manifest,
    dir: PathBuf,
    given: BTreeMap<String, String>,
}

impl ThirdPartyTool {
    /// Reads the manifest at `path`. `arguments` are the texts `NAME=VALUE` that the user gave with
    /// `--tool-arg`.
    ///
    /// Errors: [`Error::File`] if the manifest cannot be read; [`Error::Damaged`] if it is invalid;
    /// [`Error::Argument`] for an argument that it does not contain.
    pub fn read(path: &Path, arguments: &[String]) -> Result<Self> {
        let damaged = |problem: String| Error::Damaged {
            path: path.to_owned(),
            place: "manifest".into(),
            problem,
        };
        let mut text = String::new();
        let input = File::open(path).map_err(file("opening the manifest", path))?;
        let mut input = input.take(MANIFEST_BYTES_MAX + 1);
        input.read_to_string(&mut text).map_err(file("reading", path))?;
        if text.len() as u64 > MANIFEST_BYTES_MAX {
            return Err(damaged(format!("it is longer than {MANIFEST_BYTES_MAX} bytes")));
        }
        let manifest: Manifest =
            toml::from_str(&text).map_err(|error| damaged(error.to_string()))?;
        for name in [&manifest.name, &manifest.result] {
            let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            if name.is_empty() || name.starts_with('.') || !name.chars().all(plain) {
                return Err(damaged(format!(
                    "{name:?} is not a name of letters, digits, '-', '_' and '.'"
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
                    let problem = "write NAME=VALUE; the manifest must contain {arg:NAME}".into();
                    return Err(Error::Argument {
                        tool: manifest.name,
                        argument: text.clone(),
                        problem,
                    });
                }
            };
        }
        // The parent of a bare file name is empty; QEMU would search the library directories.
        let dir = path
            .parent()
            .filter(|dir| !dir.as_os_str().is_empty())
            .unwrap_or(Path::new("."))
            .to_owned();
        Ok(Self { manifest, dir, given })
    }

    /// Returns the one-line description of the tool from its manifest, for the help.
    pub fn about(&self) -> &str {
        &self.manifest.about
    }

    fn plugin(&self, interface: PluginInterface) -> Result<PathBuf> {
        let plugin = match interface {
            PluginInterface::V1 => &self.manifest.plugin.v1,
            PluginInterface::V4 => &self.manifest.plugin.v4,
            PluginInterface::V7 => &self.manifest.plugin.v7,
        };
        let plugin = plugin.as_ref().ok_or_else(|| Error::Plugin {
            operation: "choosing its file",
            problem: format!(
                "{} has none for {interface}; build it and name it interface-{} in the manifest",
                self.manifest.name,
                interface.number()
            ),
        })?;
        Ok(self.dir.join(plugin))
    }

    /// An argument of the plugin, its placeholders filled: its name and its value.
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
            return Err(wrong("required: give it with --tool-arg"));
        }
        let (name, value) =
            text.split_once('=').ok_or_else(|| wrong("write it as name=value in the manifest"))?;
        Ok((name.to_owned(), value.to_owned()))
    }
}

struct ThirdPartyRun {
    intervals: RunIntervals,
    option: String,
    part: PathBuf,
}

impl Tool for ThirdPartyTool {
    fn name(&self) -> &str {
        &self.manifest.name
    }

    /// A third party's plugin may read the RAM.
    fn reads_ram(&self) -> bool {
        true
    }

    fn can_cut(&self) -> bool {
        false
    }

    fn begin(&self, run: &RunContext) -> Result<Box<dyn ToolRun>> {
        let plugin = self.plugin(run.interface)?;
        let part = part_file(&run.dir, run.first.index, &self.manifest.name, "part");
        let arguments: Result<Vec<_>> = self
            .manifest
            .arguments
            .iter()
            .map(|text| self.argument(text, &part, &run.dir))
            .collect();
        let arguments = arguments?;
        let arguments: Vec<_> =
            arguments.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        let option = plugin_option(&plugin, &arguments);
        Ok(Box::new(ThirdPartyRun { intervals: RunIntervals::new(run), option, part }))
    }

    fn merge(&self, merge: &MergeContext) -> Result<ToolSummary> {
        let parts: Vec<PathBuf> =
            merge.parts.iter().map(|part| part.file(&self.manifest.name, "part")).collect();
        let path = merge.out.join(&self.manifest.result);
        match &self.manifest.merge {
            MergeRule::Concat => concat(&parts, &path)?,
            MergeRule::SumColumns => sum_columns(&parts, merge, &self.manifest.result)?,
            MergeRule::Command(words) => run_command(words, &parts, &path)?,
        }
        let lines = vec![format!("{} parts merged", parts.len())];
        Ok(ToolSummary { lines, files: vec![path] })
    }
}

impl ToolRun for ThirdPartyRun {
    fn option(&self) -> String {
        self.option.clone()
    }

    fn cut(&mut self, next: Option<IcountInterval>) -> Result<()> {
        self.intervals.cut(next).map(drop)
    }

    fn finish(mut self: Box<Self>) -> Result<Vec<Part>> {
        self.intervals.check_ended()?;
        // The plugin may have failed to write its part.
        std::fs::metadata(&self.part).map_err(file("looking for the plugin's part", &self.part))?;
        Ok(self.intervals.take_ended())
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
                    return Err(damaged("its header differs from the first part's"));
                }
                continue;
            }
            let mut cells = line.split(',');
            let key = cells.next().unwrap_or_default();
            let values: Option<Vec<u64>> = cells.map(|cell| cell.trim().parse().ok()).collect();
            let values =
                values.ok_or_else(|| damaged("a value after the key is not a whole number"))?;
            add_to_sum(&mut sums, key, &values).map_err(damaged)?;
        }
    }
    let mut csv = CsvFile::create(&merge.out, result, &header.unwrap_or_default())?;
    for row in &sums {
        csv.row(row)?;
    }
    csv.finish().map(drop)
}

fn add_to_sum(
    sums: &mut BTreeMap<String, Vec<u64>>,
    key: &str,
    values: &[u64],
) -> Result<(), &'static str> {
    if let Some(sum) = sums.get_mut(key) {
        if sum.len() != values.len() {
            return Err("this key had another number of columns before");
        }
        for (sum, value) in sum.iter_mut().zip(values) {
            *sum = sum.checked_add(*value).ok_or("the sum exceeds 64 bits")?;
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

fn run_command(words: &[String], parts: &[PathBuf], path: &Path) -> Result<()> {
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
    use crate::context::{Icount, IcountInterval};

    fn tool_of(dir: &Path, merge: &str) -> Result<ThirdPartyTool> {
        let text = format!(
            "name = \"t\"\narguments = [\"out={{part}}\", \"n={{arg:n}}\"]\nresult = \"t.csv\"\nmerge = {merge}\n\
            [plugin]\ninterface-1 = \"t.so\"\n"
        );
        std::fs::write(dir.join("t.toml"), text).unwrap();
        ThirdPartyTool::read(&dir.join("t.toml"), &["n=7".into()])
    }

    fn merged(merge: &str, parts: &[&str]) -> Result<String> {
        let dir = tempfile::tempdir().unwrap();
        let tool = tool_of(dir.path(), merge)?;
        let parts = parts.iter().enumerate().map(|(index, text)| {
            let interval = IcountInterval { index: index as u32, start: Icount(0), end: Icount(1) };
            let part = Part { interval, dir: dir.path().to_owned() };
            std::fs::write(part.file("t", "part"), text).unwrap();
            part
        });
        tool.merge(&MergeContext {
            parts: parts.collect(),
            out: dir.path().to_owned(),
            guest_symbols: std::sync::Arc::default(),
        })?;
        Ok(std::fs::read_to_string(dir.path().join("t.csv")).unwrap())
    }

    #[test]
    fn each_merge_rule_works() {
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
    fn parts_that_do_not_match_are_refused() {
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
    fn a_manifest_with_a_path_or_without_a_required_key_is_refused() {
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
            assert!(ThirdPartyTool::read(&path, &[]).is_err(), "{text}");
        }
        let tool = tool_of(dir.path(), "\"concat\"").unwrap();
        assert!(
            ThirdPartyTool::read(&dir.path().join("t.toml"), &["m=1".into()]).is_err(),
            "an argument that the manifest does not have"
        );
        assert!(tool.plugin(PluginInterface::V4).unwrap_err().to_string().contains("interface-4"));
        let made = tool.argument("out={part}", Path::new("/p/0.part"), Path::new("/p")).unwrap();
        assert_eq!(made, ("out".to_owned(), "/p/0.part".to_owned()));
        assert_eq!(tool.argument("n={arg:n}", Path::new(""), Path::new("")).unwrap().1, "7");
    }
}
