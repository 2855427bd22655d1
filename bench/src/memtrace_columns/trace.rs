//! Rows of `memtrace.parquet` from a guest that runs for this measurement.

use crate::guest_files::SmallGuest;
use crate::running_guest::RunningGuest;
use crate::{Error, Options};
use parquet::column::reader::ColumnReader;
use parquet::file::reader::{FileReader, SerializedFileReader};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::collections::HashMap;
use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// The most row groups that are measured.
const GROUPS_MAX: usize = 12;
const MEM: &str = "256M";
const APPEND: &str = "kf.work=hash";
/// How long the guest computes before the recording ends.
const COMPUTE_TIME: Duration = Duration::from_secs(2);
/// The intervals that contain the last instructions of this number are traced.
const TRACED_INSTRUCTIONS: u64 = 100_000_000;

/// The columns of one row group, as `memtrace` has them before it encodes them.
pub struct RowGroup {
    pub icount: Vec<i64>,
    pub pc: Numbered,
    pub vaddr: Vec<i64>,
    pub page: Numbered,
    /// Logarithms of the sizes.
    pub size: Vec<u8>,
    pub flags: Vec<u8>,
}

/// The different values of a column, and the index of each row's value.
pub struct Numbered {
    pub values: Vec<u64>,
    pub indices: Vec<u16>,
}

/// Row groups of a trace.
pub struct Trace {
    pub groups: Vec<RowGroup>,
}

impl Trace {
    /// Records a guest, traces the end of the recording, and reads the trace.
    pub fn record(options: &Options, files: &SmallGuest, dir: &Path) -> Result<Self, Error> {
        let (recording, out) = (dir.join("recording"), dir.join("analysis"));
        options.say("record a guest that hashes");
        record(options, files, &recording)?;
        options.say("trace its last intervals");
        let begin = traced_from(&recording)?.to_string();
        let words = ["--tool", "memtrace", "--jobs", "1", "--quiet", "--from", &begin];
        let mut command = keyframe(options, "analyze", &recording);
        run(command.args(words).arg("--out").arg(&out), "analyze")?;
        Self::read(&out.join("memtrace.parquet"))
    }

    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.groups.iter().map(|group| group.icount.len()).sum()
    }

    fn read(path: &Path) -> Result<Self, Error> {
        let operation = format!("read {}", path.display());
        let failed = |e: &dyn std::fmt::Display| Error::failed(&*operation, e);
        let file = File::open(path).map_err(Error::io(&*operation))?;
        let reader = SerializedFileReader::new(file).map_err(|e| failed(&e))?;
        let groups = (0..reader.num_row_groups().min(GROUPS_MAX))
            .map(|group| {
                let group = reader.get_row_group(group).map_err(|e| failed(&e))?;
                let rows = usize::try_from(group.metadata().num_rows()).map_err(|e| failed(&e))?;
                let mut columns = Vec::with_capacity(group.num_columns());
                for column in 0..group.num_columns() {
                    let column = group.get_column_reader(column).map_err(|e| failed(&e))?;
                    columns.push(values(column, rows).map_err(|e| failed(&e))?);
                }
                RowGroup::new(columns).ok_or_else(|| failed(&"it has other columns"))
            })
            .collect::<Result<Vec<_>, Error>>()?;
        if groups.is_empty() {
            return Err(failed(&"it has no rows"));
        }
        Ok(Self { groups })
    }
}

impl RowGroup {
    /// `None` unless there are the six columns of `memtrace`, with values in their ranges.
    fn new(columns: Vec<Vec<i64>>) -> Option<Self> {
        let [icount, pc, vaddr, page, size, flags]: [Vec<i64>; 6] = columns.try_into().ok()?;
        let logarithm = |size: &i64| u8::try_from(u64::try_from(*size).ok()?.checked_ilog2()?).ok();
        Some(Self {
            icount,
            pc: Numbered::new(&pc)?,
            vaddr,
            page: Numbered::new(&page)?,
            size: size.iter().map(logarithm).collect::<Option<_>>()?,
            flags: flags.iter().map(|flags| u8::try_from(*flags).ok()).collect::<Option<_>>()?,
        })
    }
}

impl Numbered {
    /// Numbers the values in the order of their first rows. `None` if there are more than 65,536.
    fn new(column: &[i64]) -> Option<Self> {
        let (mut values, mut numbers) = (Vec::new(), HashMap::new());
        let mut indices = Vec::with_capacity(column.len());
        for value in column {
            let next = values.len();
            let number = *numbers.entry(*value).or_insert(next);
            if number == next {
                values.push(value.cast_unsigned());
            }
            indices.push(u16::try_from(number).ok()?);
        }
        Some(Self { values, indices })
    }

    /// The value of each row.
    pub fn rows(&self) -> impl Iterator<Item = u64> + '_ {
        self.indices.iter().map(|index| self.values[usize::from(*index)])
    }
}

/// All values of a column of a row group.
fn values(column: ColumnReader, rows: usize) -> Result<Vec<i64>, parquet::errors::ParquetError> {
    match column {
        ColumnReader::Int64ColumnReader(mut column) => {
            let mut values = Vec::with_capacity(rows);
            column.read_records(rows, None, None, &mut values)?;
            Ok(values)
        }
        ColumnReader::Int32ColumnReader(mut column) => {
            let mut values = Vec::with_capacity(rows);
            column.read_records(rows, None, None, &mut values)?;
            Ok(values.into_iter().map(|value| value.cast_unsigned().into()).collect())
        }
        _ => Ok(Vec::new()),
    }
}

/// Records the guest until it has computed for [`COMPUTE_TIME`].
fn record(options: &Options, files: &SmallGuest, recording: &Path) -> Result<(), Error> {
    let mut line = vec![options.keyframe.display().to_string()];
    let out = recording.display().to_string();
    line.extend(
        ["record", "--quiet", "--checkpoint-every", "1s", "--out", &out, "--"].map(str::to_owned),
    );
    line.extend(files.command(MEM, APPEND));
    let mut guest = RunningGuest::start(&line)?;
    guest.wait_for("KF READY", 180)?;
    std::thread::sleep(COMPUTE_TIME);
    if let Some(pid) = i32::try_from(guest.pid()).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, Signal::INT);
    }
    guest.end(120);
    if recording.join("recording.json").is_file() {
        return Ok(());
    }
    Err(Error::failed("record a guest", "there is no recording"))
}

/// The instruction after which the traced intervals end.
fn traced_from(recording: &Path) -> Result<u64, Error> {
    let path = recording.join("recording.json");
    let operation = format!("read {}", path.display());
    let text = std::fs::read(&path).map_err(Error::io(&*operation))?;
    let meta: Value = serde_json::from_slice(&text).map_err(|e| Error::failed(&*operation, e))?;
    let instructions = meta["instructions"].as_u64();
    let instructions =
        instructions.ok_or_else(|| Error::failed(operation, "it has no number of instructions"))?;
    Ok(instructions.saturating_sub(TRACED_INSTRUCTIONS))
}

fn keyframe(options: &Options, name: &str, place: &Path) -> Command {
    let mut command = Command::new(&options.keyframe);
    command.arg(name).arg(place);
    command
}

/// Runs a command and returns its standard output.
fn run(command: &mut Command, name: &str) -> Result<Vec<u8>, Error> {
    let output = command.stdin(Stdio::null()).output();
    let output = output.map_err(Error::io(format!("run keyframe {name}")))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    Err(Error::failed(format!("keyframe {name}"), String::from_utf8_lossy(&output.stderr).trim()))
}
