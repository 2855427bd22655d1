//! QEMU's RAM blocks: their list as the monitor prints it, and where each lies in QEMU's memory.
//!
//! ```text
//!               Block Name    PSize              Offset               Used              Total                HVA  RO
//!                   pc.ram    4 KiB  0x0000000000000000 0x0000000004000000 0x0000000004000000 0x00007fa80fe00000  rw
//! ```
//!
//! The last two columns came after 7.2; without them the address is found in QEMU's heap (see
//! `ramblock_scan`).
//!
//! A block without a name belongs to a backend that is plugged into no device (not yet, or not any
//! more). The guest does not see it and QEMU's own migration leaves it out; so does the list here.

use crate::process::{Maps, QemuProcess};
use crate::{Error, Qmp, Result, audit, ramblock_scan};
use keyframe_machine::HostBlock;
use keyframe_qemu_cmdline::backend_id;
use keyframe_units::{BlockKind, HostRange, HostVirt, RamBlock, RamLayout};
use serde_json::Value;

/// QEMU's command.
pub(crate) const LIST: &str = "x-query-ramblock";
/// More blocks than any machine has.
const BLOCKS_MAX: usize = 4096;

/// A row of QEMU's list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub name: String,
    /// Its offset in QEMU's space of all RAM.
    pub offset: u64,
    pub used_bytes: u64,
    pub total_bytes: u64,
    /// The block's address in QEMU's memory, if QEMU reports it.
    pub host: Option<HostVirt>,
}

/// Returns the RAM blocks of the QEMU `pid`, whose monitor is `qmp`, with their addresses: first
/// those of memory backends, then the others, each in QEMU's own order.
///
/// Errors: [`Error::RamBlocks`] if QEMU's list of them is malformed; [`Error::RamAddress`] if a
/// block is not found in QEMU's memory; QEMU does not answer.
pub fn find_ram_blocks(qmp: &mut Qmp, pid: u32) -> Result<Vec<HostBlock>> {
    let backends = backend_ids(qmp)?;
    let rows = sorted(list(qmp)?, &backends);
    let process = QemuProcess::new(pid);
    let unknown: Vec<&Row> = rows.iter().filter(|r| r.host.is_none()).collect();
    let (maps, found) = search(&process, &unknown)?;
    let mut found = found.into_iter();
    let mut blocks = Vec::new();
    for row in &rows {
        let fail = |problem: String| Error::RamAddress { block: row.name.clone(), pid, problem };
        let host = match row.host {
            Some(host) => host,
            None => found.next().ok_or_else(|| fail("it was not looked for".into()))?,
        };
        let range = HostRange { start: host, len_bytes: row.total_bytes };
        if !maps.covers(range) {
            return Err(fail(format!(
                "{host} is not the start of {} mapped bytes",
                row.total_bytes
            )));
        }
        blocks.push(HostBlock { block: row.block(&backends), host });
    }
    check_guest_address_zero(qmp, pid, &blocks)?;
    Ok(blocks)
}

/// The mappings, and the addresses of `unknown`. QEMU gives freed heap back (`malloc_trim` in its
/// RCU thread), so a heap can shrink between the look at the mappings and the read, which then
/// fails: look again.
fn search(process: &QemuProcess, unknown: &[&Row]) -> Result<(Maps, Vec<HostVirt>)> {
    const TRIES: u32 = 20;
    for _ in 1..TRIES {
        let maps = process.maps()?;
        if unknown.is_empty() {
            return Ok((maps, Vec::new()));
        }
        match ramblock_scan::find(process, &maps, unknown) {
            Err(Error::RamAddress { .. }) => {
                std::thread::sleep(std::time::Duration::from_millis(25));
            }
            found => return Ok((maps, found?)),
        }
    }
    let maps = process.maps()?;
    let found = ramblock_scan::find(process, &maps, unknown)?;
    Ok((maps, found))
}

/// The RAM blocks as QEMU lists them now, in the order of [`find_ram_blocks`], without their
/// addresses.
pub(crate) fn layout(qmp: &mut Qmp, backends: &[String]) -> Result<RamLayout> {
    layout_of(list(qmp)?, backends)
}

/// The same; and whether a device that discards guest RAM is among those that can be plugged in.
pub(crate) fn layout_and_discards(qmp: &mut Qmp, backends: &[String]) -> Result<(RamLayout, bool)> {
    let (answer, discards) = audit::ask_with_plugged(qmp, (LIST, serde_json::json!({})))?;
    let rows = rows_of(qmp, &answer)?;
    Ok((layout_of(rows, backends)?, discards))
}

/// The layout that the answer to [`LIST`] tells.
pub(crate) fn layout_of_answer(
    qmp: &Qmp,
    answer: &Value,
    backends: &[String],
) -> Result<RamLayout> {
    layout_of(rows_of(qmp, answer)?, backends)
}

fn layout_of(rows: Vec<Row>, backends: &[String]) -> Result<RamLayout> {
    let rows = sorted(rows, backends);
    RamLayout::new(rows.iter().map(|r| r.block(backends)).collect())
        .map_err(|e| Error::RamBlocks { problem: e.to_string() })
}

/// The ids of the memory backends.
pub(crate) fn backend_ids(qmp: &mut Qmp) -> Result<Vec<String>> {
    let answer = qmp.execute("query-memdev", None)?;
    let Some(all) = answer.as_array() else { return Err(qmp.unexpected("query-memdev", &answer)) };
    Ok(all.iter().filter_map(|m| m.get("id").and_then(Value::as_str).map(str::to_owned)).collect())
}

impl Row {
    fn block(&self, backends: &[String]) -> RamBlock {
        let kind = match backend_id(&self.name, backends) {
            Some(_) => BlockKind::Backend,
            None => BlockKind::Stream,
        };
        RamBlock {
            name: self.name.clone(),
            kind,
            used_bytes: self.used_bytes,
            total_bytes: self.total_bytes,
        }
    }
}

fn sorted(mut rows: Vec<Row>, backends: &[String]) -> Vec<Row> {
    rows.sort_by_key(|r| backend_id(&r.name, backends).is_none());
    rows
}

fn list(qmp: &mut Qmp) -> Result<Vec<Row>> {
    let answer = qmp.execute(LIST, None)?;
    rows_of(qmp, &answer)
}

fn rows_of(qmp: &Qmp, answer: &Value) -> Result<Vec<Row>> {
    match answer.get("human-readable-text").and_then(Value::as_str) {
        Some(text) => Ok(parse(text)?.into_iter().filter(|row| !row.name.is_empty()).collect()),
        None => Err(qmp.unexpected(LIST, answer)),
    }
}

/// Reads QEMU's table. Names may hold spaces, so rows are read from the right.
pub(crate) fn parse(text: &str) -> Result<Vec<Row>> {
    let problem = |problem: String| Error::RamBlocks { problem };
    let mut lines = text.lines().filter(|l| !l.trim().is_empty());
    let header = lines.next().unwrap_or_default();
    let columns: Vec<&str> = header.split_whitespace().collect();
    let has = |name: &str| columns.contains(&name);
    if !(has("Offset") && has("Used") && has("Total")) {
        return Err(problem(format!("the header is {header:?}")));
    }
    let mut rows = Vec::new();
    for line in lines {
        let row = parse_row(line, has("HVA"), has("RO"));
        rows.push(row.ok_or_else(|| problem(format!("the row {line:?} cannot be read")))?);
        if rows.len() > BLOCKS_MAX {
            return Err(problem(format!("it has more than {BLOCKS_MAX} rows")));
        }
    }
    if rows.is_empty() {
        return Err(problem("it is empty".into()));
    }
    Ok(rows)
}

fn parse_row(line: &str, has_host: bool, has_ro: bool) -> Option<Row> {
    let mut rest = line.trim();
    let mut last = || {
        let (left, word) = rest.rsplit_once(char::is_whitespace).unwrap_or(("", rest));
        rest = left.trim_end();
        (!word.is_empty()).then_some(word)
    };
    let hex = |word: &str| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok();
    if has_ro {
        last()?;
    }
    let host = if has_host { Some(HostVirt(hex(last()?)?)) } else { None };
    let (total_bytes, used_bytes, offset) = (hex(last()?)?, hex(last()?)?, hex(last()?)?);
    let (_unit, _page) = (last()?, last()?);
    Some(Row { name: rest.to_owned(), offset, used_bytes, total_bytes, host })
}

/// Guest address 0 is main RAM on every machine supported; QEMU tells where it lies on every
/// version.
fn check_guest_address_zero(qmp: &mut Qmp, pid: u32, blocks: &[HostBlock]) -> Result<()> {
    let answer = qmp.hmp("gpa2hva 0")?;
    // "Host virtual address for 0x0 (pc.ram) is 0x7fd6fbe00000"
    let Some((name, host)) = parse_gpa2hva(&answer) else { return Ok(()) };
    match blocks.iter().find(|b| b.block.name == name) {
        Some(block) if block.host != host => Err(Error::RamAddress {
            block: block.block.name.clone(),
            pid,
            problem: format!("found at {}, but QEMU says {host}", block.host),
        }),
        _ => Ok(()),
    }
}

fn parse_gpa2hva(answer: &str) -> Option<(&str, HostVirt)> {
    let (_, rest) = answer.trim().split_once(" (")?;
    let (name, host) = rest.rsplit_once(") is 0x")?;
    Some((name, HostVirt(u64::from_str_radix(host, 16).ok()?)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const OLD: &str = "
              Block Name    PSize              Offset               Used              Total
                  pc.ram    4 KiB  0x0000000000000000 0x0000000004000000 0x0000000004000000
    /rom@etc/acpi/tables    4 KiB  0x0000000004080000 0x0000000000020000 0x0000000000200000
";
    const NEW: &str = "
              Block Name    PSize              Offset               Used              Total                HVA  RO
 /objects/my ram    2 MiB  0x0000000000000000 0x0000000004000000 0x0000000004000000 0x00007fa80fe00000  rw
";

    #[test]
    fn both_tables_are_read() {
        let old = parse(OLD).unwrap();
        assert_eq!(old.len(), 2);
        assert_eq!(old[1].name, "/rom@etc/acpi/tables");
        assert_eq!(
            (old[1].offset, old[1].used_bytes, old[1].total_bytes),
            (0x408_0000, 0x2_0000, 0x20_0000)
        );
        assert_eq!(old[1].host, None);
        let new = parse(NEW).unwrap();
        assert_eq!(new[0].name, "/objects/my ram");
        assert_eq!(new[0].host, Some(HostVirt(0x7fa8_0fe0_0000)));
        let nameless = "4 KiB  0x000000000a300000 0x0000000008000000 0x0000000008000000";
        let row = &parse(&format!("{OLD}                            {nameless}")).unwrap()[2];
        assert_eq!((&*row.name, row.offset, row.total_bytes), ("", 0xa30_0000, 0x800_0000));
    }

    #[test]
    fn what_is_no_table_is_refused() {
        for text in
            ["", "x", &OLD.replace("0x0000000004080000", "oops"), &OLD.replace("Offset", "?")]
        {
            assert!(matches!(parse(text), Err(Error::RamBlocks { .. })), "{text}");
        }
    }

    #[test]
    fn backends_come_first_and_are_known_by_either_name() {
        let backends = vec!["my ram".to_owned(), "pc.ram".to_owned()];
        assert_eq!(backend_id("/objects/my ram", &backends), Some("my ram"));
        assert_eq!(backend_id("pc.ram", &backends), Some("pc.ram"));
        assert_eq!(backend_id("0000:00:04.0/my ram", &backends), Some("my ram"));
        assert_eq!(backend_id("0000:00:02.0/vga.vram", &backends), None);
        assert_eq!(backend_id("pc.rom", &backends), None);
        let mut rows = parse(OLD).unwrap();
        rows.reverse();
        let rows = sorted(rows, &backends);
        assert_eq!(rows[0].block(&backends).kind, BlockKind::Backend);
        assert_eq!(rows[1].block(&backends).kind, BlockKind::Stream);
    }

    #[test]
    fn the_address_of_guest_address_zero_is_read() {
        let answer = "Host virtual address for 0x0 (pc.ram) is 0x7fd6fbe00000\r\n";
        assert_eq!(parse_gpa2hva(answer), Some(("pc.ram", HostVirt(0x7fd6_fbe0_0000))));
        assert_eq!(parse_gpa2hva("No memory is mapped at address 0x0"), None);
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "[ x0-9a-f\nOffsetUsdTlHVAR]{0,200}", tail in ".{0,80}") {
            let _ = parse(&text);
            let _ = parse(&format!("{OLD}{tail}"));
            let _ = parse_gpa2hva(&tail);
        }
    }
}
