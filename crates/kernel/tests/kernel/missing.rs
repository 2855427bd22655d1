//! Memory whose pages come when they are touched: what is placed and what stays, faults of the
//! kernel, and whoever serves being killed.

use crate::target::{PAGE, Target, part, role_arguments, start_role};
use keyframe_kernel::missing_pages::MissingPages;
use keyframe_kernel::{Process, read_memory};
use keyframe_units::{HostRange, HostVirt};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

const PAGES: u64 = 512;
const KILLS: u64 = 12;
/// How long a thread that must wait for ever is watched.
const WATCHED: Duration = Duration::from_millis(300);

/// What page `page` is to hold.
fn pattern(page: u64) -> [u8; PAGE as usize] {
    [(page % 250) as u8 + 1; PAGE as usize]
}

fn missing(process: &Process, range: HostRange) -> MissingPages {
    let mut missing = MissingPages::inject(process).unwrap();
    missing.register(range).unwrap();
    missing
}

/// Places touched pages until `stop`, every fifth as zeros; gives back which.
fn serve(missing: &MissingPages, ram: HostRange, stop: &OwnedFd) -> Vec<u64> {
    let (mut touched, mut served) = (Vec::new(), Vec::new());
    while missing.wait(stop.as_fd(), &mut touched).unwrap() {
        for address in touched.drain(..) {
            let page = (address.0 - ram.start.0) / PAGE;
            let placed = if page.is_multiple_of(5) {
                missing.place_zeros(HostRange { start: address, len_bytes: PAGE })
            } else {
                missing.place(address, &pattern(page))
            };
            if placed.unwrap() == 1 {
                served.push(page);
            }
        }
    }
    served
}

/// Runs `body` while a thread serves; gives back what that thread served.
fn served_while(missing: &MissingPages, ram: HostRange, body: impl FnOnce()) -> Vec<u64> {
    let stop = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    std::thread::scope(|scope| {
        let server = scope.spawn(|| serve(missing, ram, &stop));
        body();
        rustix::io::write(&stop, &1_u64.to_ne_bytes()).unwrap();
        server.join().unwrap()
    })
}

fn byte(target: &Target, ram: HostRange, page: u64) -> u8 {
    let mut byte = [0xee];
    read_memory(&target.process, HostVirt(ram.start.0 + page * PAGE), &mut byte).unwrap();
    byte[0]
}

fn descriptors(target: &Target) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", target.process.pid())).unwrap().count()
}

#[test]
fn each_page_comes_when_it_is_touched_and_what_is_there_stays() {
    let mut target = Target::start();
    let ram = target.map("memfd", PAGES * PAGE);
    let before = descriptors(&target);
    let missing = missing(&target.process, ram);
    assert_eq!(descriptors(&target), before + 1, "it keeps a descriptor of its own");
    // Read ahead: pages 100 to 199.
    let ahead: Vec<u8> = (100..200).flat_map(pattern).collect();
    assert_eq!(missing.place(part(ram, 100, 1).start, &ahead).unwrap(), 100);
    let mut served = served_while(&missing, ram, || {
        // User code writes, the kernel writes for it (read(2)), and we read from outside.
        target.write(ram, 3, 2, 0xaa);
        target.write(ram, 150, 1, 0xbb);
        target.on("receive", ram, 300, 2, "204");
        assert_eq!(byte(&target, ram, 7), pattern(7)[0]);
        assert_eq!(byte(&target, ram, 10), 0, "a page of zeros");
    });
    served.sort_unstable();
    assert_eq!(served, [3, 4, 7, 10, 300, 301], "and nothing that was there");
    // All of it ahead, over what is there.
    let all: Vec<u8> = (0..PAGES).flat_map(pattern).collect();
    let placed = missing.place(ram.start, &all).unwrap();
    assert_eq!(placed, PAGES - 100 - 6);
    let was_written = |page| {
        [(3, 0xaa), (4, 0xaa), (150, 0xbb), (300, 204), (301, 204), (10, 0)]
            .iter()
            .find(|(p, _)| *p == page)
            .map(|(_, byte)| *byte)
    };
    for page in 0..PAGES {
        let expected = was_written(page).unwrap_or(pattern(page)[0]);
        assert_eq!(byte(&target, ram, page), expected, "page {page}");
    }
    missing.complete().unwrap();
    missing.release().unwrap();
    assert_eq!(descriptors(&target), before, "nothing is left behind");
    target.on("punch", ram, 8, 1, "");
    assert_eq!(byte(&target, ram, 8), 0, "it is ordinary memory again");
}

#[test]
fn what_is_discarded_is_missing_again() {
    let mut target = Target::start();
    let ram = target.map("memfd", PAGES * PAGE);
    let missing = missing(&target.process, ram);
    assert_eq!(missing.place(ram.start, &pattern(0)).unwrap(), 1);
    target.on("punch", ram, 0, 1, "");
    let served = served_while(&missing, ram, || target.write(ram, 0, 1, 9));
    assert_eq!(served, [0]);
}

/// What cannot be missing is refused, and the process runs on.
#[test]
fn memory_that_is_not_mapped_is_refused() {
    let mut target = Target::start();
    let ram = target.map("memfd", PAGES * PAGE);
    let mut missing = MissingPages::inject(&target.process).unwrap();
    let behind = HostRange { start: ram.start, len_bytes: ram.len_bytes + (1 << 40) };
    assert!(missing.register(behind).is_err());
    target.write(ram, 0, 1, 1);
    missing.release().unwrap();
    target.end();
    assert!(missing.place(ram.start, &pattern(0)).is_err(), "the process is gone");
}

/// Makes the memory of another test's target missing and serves some of it, until killed.
#[test]
#[ignore = "a role of another test"]
fn role_that_serves() {
    let Some(arguments) = role_arguments() else { return };
    let number = |index: usize| arguments[index].parse::<u64>().unwrap();
    let process = Process::open(number(0) as u32).unwrap();
    let ram = HostRange { start: HostVirt(number(1)), len_bytes: number(2) };
    let missing = missing(&process, ram);
    println!("ready");
    // The second half never comes.
    for page in 0..PAGES / 2 {
        missing.place(part(ram, page, 1).start, &pattern(page)).unwrap();
        std::thread::sleep(Duration::from_micros(100));
    }
    std::thread::sleep(Duration::from_mins(1));
}

/// Whatever instant we are killed at: what came is right, and who touches what did not come waits,
/// for ever. It never reads zeros.
#[test]
fn whoever_serves_is_killed_and_the_process_never_reads_what_did_not_come() {
    for kill in 0..KILLS {
        let mut target = Target::start();
        let ram = target.map("memfd", PAGES * PAGE);
        let arguments = format!("{} {}", ram.start.0, ram.len_bytes);
        let mut role = start_role("missing::role_that_serves", &target, &arguments);
        std::thread::sleep(Duration::from_millis(kill * 3));
        role.kill();
        // A page of the half that never comes.
        target.tell(&format!("write {} {PAGE} 1", part(ram, PAGES / 2 + kill, 1).start.0));
        let until = Instant::now() + WATCHED;
        while Instant::now() < until {
            assert_eq!(target.try_answer(), None, "it went on with a page that was never placed");
            std::thread::sleep(Duration::from_millis(5));
        }
        target.end();
    }
}
