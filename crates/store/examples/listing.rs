//! Measures how long a listing takes:
//! `cargo run --release -p keyframe-store --example listing [CHECKPOINTS]`. Checkpoints as those of
//! a small PC are: a long command line, 90 KB of device state of which a quarter is left when it is
//! compressed. Warm, best of five turns, and the first one.

use keyframe_store::{Durability, MachineMeta, SealRequest, Store, Timing, Tuning};
use keyframe_units::{BlockKind, PageIndex, RamBlock, RamLayout};
use std::time::{Duration, Instant};

const TURNS: usize = 5;
const DEVICE_BYTES: usize = 90_000;

fn layout() -> RamLayout {
    let blocks = [
        ("pc.ram", 128 << 20),
        ("vga.vram", 16 << 20),
        ("pc.bios", 256 << 10),
        ("pc.rom", 128 << 10),
    ];
    let block = |(name, bytes): (&str, u64)| RamBlock {
        name: name.into(),
        kind: BlockKind::Backend,
        used_bytes: bytes,
        total_bytes: bytes,
    };
    RamLayout::new(blocks.map(block).to_vec()).unwrap_or_else(|e| panic!("{e}"))
}

/// One byte in four is noise, the rest is like its neighbours.
fn device_state(seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut bytes = vec![0; DEVICE_BYTES];
    for (at, byte) in bytes.iter_mut().enumerate() {
        if at % 64 < 16 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            *byte = (state >> 56) as u8;
        }
    }
    bytes
}

fn fill(store: &Store, count: u64) -> keyframe_store::Result<()> {
    let (ram, words) =
        (layout(), "-device virtio-blk-pci,drive=d,id=disk0,bus=pci.0,addr=0x5 -m 128M".split(' '));
    let words: Vec<String> = words.cycle().take(40).map(String::from).collect();
    let machine = MachineMeta {
        binary_path: "/usr/bin/qemu-system-x86_64".into(),
        vmm_version: "7.2.0".into(),
        binary_blake3: "5a".repeat(32),
        machine_type: "pc-i440fx-7.2".into(),
        vcpus: 1,
        user_command: words.clone(),
        ..MachineMeta::default()
    };
    let mut writer = store.lock_writer_tuned(
        "listing",
        Tuning { durability: Durability::Never, ..Tuning::default() },
    )?;
    let mut run = writer.begin_run("web", &ram)?;
    for number in 0..count {
        let mut page = [0; 4096];
        page[..8].copy_from_slice(&number.to_le_bytes());
        run.put_page(PageIndex(number % 100), &page)?;
        run.seal(SealRequest {
            taken_at: jiff::Timestamp::now(),
            since_boot: None,
            reason: "interval".into(),
            parent: None,
            ram: ram.clone(),
            machine: machine.clone(),
            members: Vec::new(),
            timing: Timing::default(),
            device_state: &device_state(number),
            tag: None,
        })?;
    }
    run.finish()
}

fn measure(path: &std::path::Path, count: u64) -> keyframe_store::Result<()> {
    fill(&Store::init(path)?, count)?;
    let look = |_| {
        let began = Instant::now();
        let store = Store::open(path)?;
        let opened = began.elapsed();
        let listing = store.checkpoints()?;
        assert_eq!(listing.sealed.len() as u64, count, "{:?}", listing.unreadable.first());
        Ok((opened, began.elapsed()))
    };
    let turns: Vec<(Duration, Duration)> =
        (0..TURNS).map(look).collect::<keyframe_store::Result<_>>()?;
    let ms = |time: Option<Duration>| time.unwrap_or_default().as_secs_f64() * 1e3;
    let began = Instant::now();
    let newest = Store::open(path)?.resolve("latest")?;
    Store::open(path)?.load_unmapped(newest)?;
    let latest = began.elapsed();
    println!(
        "{count} checkpoints: open {:.2} ms, open and load the newest one {:.2} ms",
        ms(turns.iter().map(|t| t.0).min()),
        ms(Some(latest))
    );
    println!(
        "listing: first {:.1} ms, best {:.1} ms",
        ms(turns.first().map(|t| t.1)),
        ms(turns.iter().map(|t| t.1).min())
    );
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let count = std::env::args().nth(1).and_then(|count| count.parse().ok()).unwrap_or(10_000);
    let dir = std::env::temp_dir().join(format!("keyframe-listing.{}", std::process::id()));
    let measured = measure(&dir, count);
    std::fs::remove_dir_all(&dir)?;
    Ok(measured?)
}
