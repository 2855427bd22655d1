//! Prints the symbols of the Linux kernel in a raw image of a VM's memory, as `/proc/kallsyms`
//! does:
//! `cargo run -p keyframe-kallsyms --example kallsyms -- vm.raw`.

use std::fs::File;
use std::os::unix::fs::FileExt;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("usage: kallsyms IMAGE")?;
    let image = File::open(&path)?;
    let read = |at, out: &mut [u8]| image.read_exact_at(out, at);
    let symbols = keyframe_kallsyms::find(image.metadata()?.len(), read)?;
    for one in symbols {
        println!("{:016x} {} {}", one.address, one.kind, one.name);
    }
    Ok(())
}
