//! What checkpoints tell, as a report: pauses, pages, bytes, growth, deduplication.

use super::ReportPage;
use crate::as_shown;
use crate::error::Result;
use keyframe_inspect::entry::{DiskSums, Entry};
use keyframe_plot::{Axis, Chart, Figure, Point, Scale, Series, decimal};
use keyframe_store::{Growth, Sealed, Stats};
use keyframe_units::{human_bytes, human_duration, percentile};
use keyframe_web::{CheckpointListing, Timeline, TimelineBucket};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Points of a plot.
const POINTS: usize = 400;
/// VMs with plots of their own; of more, the table tells.
const PLOTTED_MAX: usize = 12;
/// A checkpoint that begins later than this is late: a timer is never exact.
const LATE_NS: u64 = 1_000_000;
/// Rows of a table that could become long.
const ROWS_MAX: usize = 48;

/// A number of a checkpoint: a phase of its pause, say.
type NumberOf = fn(&Entry) -> u64;
const PHASES: [(&str, NumberOf); 6] = [
    ("stop", |e| e.pause.stop),
    ("device state", |e| e.pause.device_state),
    ("scan", |e| e.pause.scan),
    ("copy", |e| e.pause.copy),
    ("resume", |e| e.pause.resume),
    ("whole pause", |e| e.pause_ns),
];

/// Adds to `page` all parts about the checkpoints `sealed`. Error: a plot cannot be drawn.
pub fn add(page: &mut ReportPage, sealed: &[Sealed]) -> Result<()> {
    let entries: Vec<Entry> = sealed.iter().map(Entry::of).collect();
    let mut of_vms = BTreeMap::<&str, Vec<&Entry>>::new();
    for entry in &entries {
        of_vms.entry(&entry.vm).or_default().push(entry);
    }
    summary(page, sealed, &of_vms);
    let listing = CheckpointListing {
        generation: 1,
        checkpoints: sealed.iter().map(|one| Arc::new(as_shown(one))).collect(),
    };
    for (vm, entries) in of_vms.iter().take(PLOTTED_MAX) {
        of_vm(page, vm, entries, &listing)?;
    }
    if of_vms.len() > PLOTTED_MAX {
        page.line(&format!(
            "{} more VMs are in the table above alone.",
            of_vms.len() - PLOTTED_MAX
        ));
    }
    growth(page, sealed)?;
    let disks = DiskSums::of(&entries);
    if !disks.is_empty() {
        page.part("Disks");
        let row = |disk: &DiskSums| {
            let c = &disk.counts;
            vec![
                format!("{} {}", disk.vm, disk.name),
                disk.checkpoints.len().to_string(),
                human_bytes(disk.written_bytes),
                c.zero_blocks.to_string(),
                (c.dedup_blocks + c.unchanged_blocks).to_string(),
                human_bytes(c.stored_bytes),
            ]
        };
        let rows: Vec<_> = disks.iter().map(row).collect();
        page.table(
            "Written to each disk, in blocks of 4 KiB",
            &["Disk", "Checkpoints", "Written", "Zero", "Deduplicated", "Stored"],
            &rows,
        );
    }
    Ok(())
}

fn summary(page: &mut ReportPage, sealed: &[Sealed], of_vms: &BTreeMap<&str, Vec<&Entry>>) {
    page.part("VMs");
    let machines: BTreeMap<&str, &Sealed> =
        sealed.iter().map(|one| (one.meta.vm.as_str(), one)).collect();
    let row = |(vm, entries): (&&str, &Vec<&Entry>)| {
        let (first, last) = (entries.first()?, entries.last()?);
        let machine = &machines.get(vm)?.meta.machine;
        let mut runs: Vec<&str> = entries.iter().map(|entry| entry.run.as_str()).collect();
        runs.sort_unstable();
        runs.dedup();
        Some(vec![
            (*vm).to_owned(),
            entries.len().to_string(),
            runs.len().to_string(),
            moment(&first.taken_at),
            moment(&last.taken_at),
            human_bytes(last.ram_bytes),
            format!(
                "{}, {} CPUs, QEMU {}",
                machine.machine_type, machine.vcpus, machine.vmm_version
            ),
        ])
    };
    let rows: Vec<_> = of_vms.iter().filter_map(row).collect();
    page.table(
        "The checkpoints that are left",
        &["VM", "Checkpoints", "Runs", "First (UTC)", "Last (UTC)", "RAM", "Machine"],
        &rows,
    );
    let named = sealed.iter().filter(|one| !one.tags.is_empty()).map(|one| {
        let names: Vec<&str> =
            one.names().map(String::as_str).chain(one.is_pinned().then_some("(pinned)")).collect();
        vec![
            one.id.to_string(),
            one.meta.vm.clone(),
            moment(&one.meta.taken_at.to_string()),
            names.join(", "),
        ]
    });
    let named: Vec<_> = named.take(ROWS_MAX).collect();
    if !named.is_empty() {
        page.table("With names", &["Checkpoint", "VM", "Taken (UTC)", "Tags"], &named);
    }
}

/// Adds the part about one VM: its pauses, its pages and a plot of them over all its checkpoints.
fn of_vm(
    page: &mut ReportPage,
    vm: &str,
    entries: &[&Entry],
    listing: &CheckpointListing,
) -> Result<()> {
    page.part(&format!("VM {vm}"));
    add_pauses(page, entries);
    add_pages(page, entries);
    let late = entries.iter().filter(|entry| entry.backlog_ns > LATE_NS).count();
    page.line(&format!(
        "{} of {} checkpoints began more than 1 ms late, because the one before was still being encoded; {} at most.",
        late,
        entries.len(),
        human_duration(entries.iter().map(|entry| entry.backlog_ns).max().unwrap_or(0))
    ));
    let timeline = Timeline::of(listing, Some(vm), &(0..=u64::MAX), POINTS);
    page.figure(&plots(&timeline.buckets), &timeline_caption(&timeline))?;
    add_longest_pauses(page, entries);
    Ok(())
}

/// Adds the percentiles of each phase of the pause.
fn add_pauses(page: &mut ReportPage, entries: &[&Entry]) {
    let row = |(name, value): &(&str, NumberOf)| {
        let mut sample: Vec<u64> = entries.iter().map(|entry| value(entry)).collect();
        sample.sort_unstable();
        let at = [50, 90, 99, 100].map(|percent| human_duration(percentile(&sample, percent)));
        std::iter::once((*name).to_owned()).chain(at).collect::<Vec<_>>()
    };
    let rows: Vec<_> = PHASES.iter().map(row).collect();
    page.table(
        "Pauses by phase, over all its checkpoints",
        &["Phase", "Median", "90 %", "99 %", "Longest"],
        &rows,
    );
}

/// Adds the number of pages that were dirty, and how many of them were stored.
fn add_pages(page: &mut ReportPage, entries: &[&Entry]) {
    let sum = |value: fn(&Entry) -> u64| entries.iter().map(|entry| value(entry)).sum::<u64>();
    let pages: [(&str, NumberOf); 5] = [
        ("dirty", |e| e.dirty_pages),
        ("of these zero", |e| e.zero_pages),
        ("deduplicated", |e| e.dedup_pages),
        ("unchanged", |e| e.unchanged_pages),
        ("stored", |e| e.stored_pages),
    ];
    let each = |pages: u64| format!("{:.0}", pages as f64 / entries.len().max(1) as f64);
    let rows: Vec<_> = pages
        .iter()
        .map(|(name, value)| {
            vec![
                (*name).into(),
                sum(*value).to_string(),
                each(sum(*value)),
                human_bytes(sum(*value) * 4096),
            ]
        })
        .collect();
    page.table("What became of pages", &["Pages", "In all", "A checkpoint", "Bytes"], &rows);
}

/// Adds the five checkpoints with the longest pauses.
fn add_longest_pauses(page: &mut ReportPage, entries: &[&Entry]) {
    let mut slow: Vec<&&Entry> = entries.iter().collect();
    slow.sort_by_key(|entry| std::cmp::Reverse(entry.pause_ns));
    let rows: Vec<_> = slow
        .iter()
        .take(5)
        .map(|e| {
            let phases = PHASES.iter().map(|(_, value)| human_duration(value(e)));
            [e.id.to_string(), moment(&e.taken_at)]
                .into_iter()
                .chain(phases)
                .chain([e.dirty_pages.to_string()])
                .collect()
        })
        .collect();
    let header = [
        "Checkpoint",
        "Taken (UTC)",
        "Stop",
        "Device state",
        "Scan",
        "Copy",
        "Resume",
        "Whole",
        "Dirty pages",
    ];
    page.table("The longest pauses", &header, &rows);
}

/// The text under the plot: how many checkpoints it shows, and how they share points.
fn timeline_caption(timeline: &Timeline) -> String {
    let (shown, buckets) = (timeline.shown, timeline.buckets.len());
    let place = if shown > buckets {
        "; where several share a point, the longest pause, and the mean of the rest"
    } else {
        ""
    };
    format!("{shown} checkpoints in the order in which they were taken{place}.")
}

/// Pauses, pages and bytes, one above the other.
fn plots(buckets: &[TimelineBucket]) -> Figure {
    let series = |name: &str, value: &dyn Fn(&TimelineBucket) -> f64| Series {
        name: name.into(),
        points: buckets
            .iter()
            .map(|one| Point { x: one.first_id as f64, y: value(one), deviation: None })
            .collect(),
    };
    let x = || Axis::new("checkpoint", Scale::Linear);
    let mean = |sum: u64, one: &TimelineBucket| sum as f64 / one.count.max(1) as f64;
    let names = ["stop", "device state", "scan", "copy", "resume"];
    let mut pauses: Vec<Series> = names
        .iter()
        .enumerate()
        .map(|(at, name)| series(name, &|one| one.pause.named()[at].1 as f64 / 1e6))
        .collect();
    pauses.push(series("whole pause", &|one| one.pause_ns as f64 / 1e6));
    let pages = vec![
        series("dirty", &|one| mean(one.dirty_pages, one)),
        series("zero", &|one| mean(one.zero_pages, one)),
        series("deduplicated", &|one| mean(one.dedup_pages + one.unchanged_pages, one)),
        series("stored", &|one| mean(one.stored_pages, one)),
    ];
    let added = vec![series("added to the store", &|one| mean(one.added_bytes, one))];
    let bytes = |value: f64| human_bytes(value as u64);
    let chart = |title: &str, y: Axis, series| Chart { title: title.into(), x: x(), y, series };
    Figure {
        title: String::new(),
        charts: vec![
            chart(
                "Pause by phase",
                Axis { write: decimal, ..Axis::new("ms", Scale::Linear) },
                pauses,
            ),
            chart("Pages of a checkpoint", Axis::new("pages", Scale::Linear), pages),
            chart(
                "Bytes of a checkpoint",
                Axis { write: bytes, ..Axis::new("bytes", Scale::Linear) },
                added,
            ),
        ],
    }
}

fn growth(page: &mut ReportPage, sealed: &[Sealed]) -> Result<()> {
    let growth = Growth::of(sealed);
    page.part("Growth");
    let (mut dirty_bytes, mut dirty, mut stored) = (0, Vec::new(), Vec::new());
    for piece in keyframe_web::chunks(growth.checkpoints.len(), POINTS) {
        let Some(last) = growth.checkpoints[piece.clone()].last() else { continue };
        dirty_bytes += growth.checkpoints[piece].iter().map(|one| one.dirty_bytes).sum::<u64>();
        let point = |y: u64| Point { x: last.id.0 as f64, y: y as f64, deviation: None };
        dirty.push(point(dirty_bytes));
        stored.push(point(last.sum_bytes));
    }
    let bytes = |value: f64| human_bytes(value as u64);
    let chart = Chart {
        title: "Sum over all checkpoints that are left".into(),
        x: Axis::new("checkpoint", Scale::Linear),
        y: Axis { write: bytes, ..Axis::new("bytes", Scale::Linear) },
        series: vec![
            Series { name: "dirty".into(), points: dirty },
            Series { name: "added to the store".into(), points: stored },
        ],
    };
    page.figure(
        &Figure { title: String::new(), charts: vec![chart] },
        "What was dirty, and what the store grew by.",
    )?;
    let rows: Vec<_> = growth
        .hours
        .iter()
        .rev()
        .take(ROWS_MAX)
        .map(|hour| {
            let from = moment(&hour.from.to_string());
            vec![
                from,
                hour.checkpoints.to_string(),
                human_bytes(hour.dirty_bytes),
                human_bytes(hour.added_bytes),
            ]
        })
        .collect();
    page.table(
        "By hour, the newest first",
        &["Hour (UTC)", "Checkpoints", "Dirty", "Added"],
        &rows,
    );
    Ok(())
}

/// Adds the part "Store": its sizes, and what deduplication and compression saved.
pub fn add_store(page: &mut ReportPage, stats: &Stats) {
    let b = human_bytes;
    let times =
        |ratio: Option<f64>| ratio.map_or_else(|| "-".into(), |ratio| format!("{ratio:.1}x"));
    page.part("Store");
    page.facts(
        "What it holds, and what was saved",
        &[
            ("Checkpoints", format!("{} in {} runs", stats.checkpoints, stats.runs)),
            ("Full images of all would take", b(stats.raw_bytes)),
            ("Dirty pages", b(stats.dirty_bytes)),
            ("Of these: zero", format!("{} pages", stats.zero_pages)),
            (
                "Deduplicated",
                format!(
                    "{} pages, {} of them against disks",
                    stats.dedup_pages, stats.dedup_disk_pages
                ),
            ),
            ("Unchanged", format!("{} pages", stats.unchanged_pages)),
            ("Stored", format!("{} pages in {}", stats.stored_pages, b(stats.stored_bytes))),
            (
                "Disks",
                format!(
                    "{} written, stored in {}",
                    b(stats.disk_dirty_bytes),
                    b(stats.disk_stored_bytes)
                ),
            ),
            (
                "On disk",
                format!(
                    "{}: packs {}, maps {}, device state {}",
                    b(stats.total_bytes),
                    b(stats.pack_bytes),
                    b(stats.map_bytes),
                    b(stats.checkpoint_file_bytes)
                ),
            ),
            ("Saved by deduplication", times(stats.dedup_ratio)),
            ("By compression", times(stats.compression_ratio)),
            ("Against full images", times(stats.reduction_ratio)),
        ],
    );
}

fn moment(text: &str) -> String {
    text.get(..19).unwrap_or(text).replace('T', " ")
}
