//! The process that this crate's tests attach to: it does what its standard input says, one command
//! a line, in its main thread, and answers each by a line. The first line is `@ready`.
//!
//! ```text
//!   map KIND BYTES          @ADDRESS      KIND: see `map`
//!   unmap ADDRESS BYTES     @ok
//!   remap ADDRESS BYTES     @ok           private anonymous memory there
//!   advise ADDRESS BYTES    @ok           makes a mapping of its own of it (MADV_DONTFORK)
//!   write ADDRESS BYTES N   @ok           every byte becomes N
//!   churn ADDRESS BYTES N   @waiting @ok  N into each page once, all over the place; a power of two of pages
//!   scribble ADDRESS BYTES THREADS WRITES DISCARDS  @waiting @ok
//!                                         that many threads write all over the place, so often each; the main thread
//!                                         discards meanwhile, so often (MADV_DONTNEED)
//!   storm ADDRESS BYTES MS  @waiting @ok  threads of several kinds write all over the place for so long: stores, read(2)
//!                                         into the memory, and threads that end after some writes
//!   zap ADDRESS BYTES       @ok           MADV_DONTNEED
//!   wipe ADDRESS BYTES      @ok           MADV_WIPEONFORK
//!   remove ADDRESS BYTES    @ok           MADV_REMOVE
//!   punch ADDRESS BYTES     @ok           FALLOC_FL_PUNCH_HOLE in the file behind the mapping
//!   pageout ADDRESS BYTES   @ok           MADV_PAGEOUT
//!   receive ADDRESS BYTES N @ok           read(2) from a pipe into the memory
//!   direct ADDRESS BYTES N  @ok           read(2) with O_DIRECT from a file
//!   demote                  @ok           become an ordinary user
//!   filter                  @ok           install a seccomp filter that allows all
//!   count                   @ok           count signal 36 from now on
//!   counted                 @N
//!   sleep MS | ppoll MS | futex MS        @RESULT ERRNO of that one system call
//!   spin N                  @CHECKSUM     arithmetic in integer and vector registers
//!   toil MS THREADS         @waiting @ok STEPS   all threads compute and wait in turn, checking each result; or @wrong WHAT
//!   stopped                 @PID          stop the whole process (SIGSTOP); answers when continued
//!   exit                                  exits, without an answer
//! ```

use std::io::{BufRead, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Files behind mappings: address, length, descriptor.
type Files = Vec<(usize, usize, OwnedFd)>;

const HUGE: usize = 2 << 20;
static SIGNALS: AtomicU64 = AtomicU64::new(0);

fn main() {
    let mut files = Files::new();
    let mut line = String::new();
    let stdin = std::io::stdin();
    println!("@ready");
    while {
        line.clear();
        stdin.lock().read_line(&mut line).is_ok_and(|n| n > 0)
    } {
        let words: Vec<&str> = line.split_whitespace().collect();
        let answer = run(&words, &mut files).unwrap_or_else(|error| format!("error {error}"));
        println!("@{answer}");
        std::io::stdout().flush().expect("write the answer");
    }
}

fn run(words: &[&str], files: &mut Files) -> std::io::Result<String> {
    let number = |index: usize| words[index].parse::<usize>().expect("a number");
    let ok = |()| "ok".to_owned();
    match words[0] {
        "map" => map(words[1], number(2), files).map(|address| address.to_string()),
        "unmap" => unmap(number(1), number(2)).map(ok),
        "write" => {
            // SAFETY: the test names memory that it had mapped here, writable, of that length;
            // nothing refers to it.
            unsafe { std::ptr::write_bytes(number(1) as *mut u8, number(3) as u8, number(2)) };
            Ok("ok".into())
        }
        "remap" => remap(number(1), number(2)).map(ok),
        "advise" => advise(number(1), number(2), libc::MADV_DONTFORK).map(ok),
        "churn" => {
            churn(number(1), number(2), number(3));
            Ok("ok".into())
        }
        "storm" => {
            storm(number(1), number(2), Duration::from_millis(number(3) as u64))?;
            Ok("ok".into())
        }
        "scribble" => {
            scribble(number(1), number(2), number(3), number(4), number(5));
            Ok("ok".into())
        }
        "wipe" => advise(number(1), number(2), libc::MADV_WIPEONFORK).map(ok),
        "remove" => advise(number(1), number(2), libc::MADV_REMOVE).map(ok),
        "filter" => filter().map(ok),
        "zap" => advise(number(1), number(2), libc::MADV_DONTNEED).map(ok),
        "pageout" => advise(number(1), number(2), libc::MADV_PAGEOUT).map(ok),
        "punch" => punch(number(1), number(2), files).map(ok),
        "receive" => receive(number(1), number(2), number(3) as u8).map(ok),
        "direct" => direct(number(1), number(2), number(3) as u8).map(ok),
        "demote" => demote().map(ok),
        "count" => count().map(ok),
        "counted" => Ok(SIGNALS.load(Ordering::SeqCst).to_string()),
        "sleep" | "ppoll" | "futex" => Ok(wait(words[0], number(1))),
        "spin" => {
            println!("@waiting");
            Ok(spin(number(1)).to_string())
        }
        "toil" => Ok(toil(number(1), number(2))),
        "stopped" => {
            // SAFETY: raise takes any signal number.
            unsafe { libc::raise(libc::SIGSTOP) };
            Ok(std::process::id().to_string())
        }
        "exit" => std::process::exit(7),
        other => panic!("no command {other}"),
    }
}

fn check(code: i64) -> std::io::Result<i64> {
    if code < 0 { Err(std::io::Error::last_os_error()) } else { Ok(code) }
}

/// Maps memory: `anon` (private anonymous), `thp` (the same with huge pages, aligned), `memfd` and
/// `sealed` (shared, the second sealed against shrinking), `file` (a file, shared), `copy` and
/// `memcopy` (private, of a file of 0x11 bytes and of a memfd), `hugetlb` and `hugeanon` (2 MiB
/// pages, shared memfd and private anonymous).
fn map(kind: &str, len: usize, files: &mut Files) -> std::io::Result<usize> {
    let flags = match kind {
        "anon" | "thp" => libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        "hugeanon" => {
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | libc::MAP_HUGE_2MB
        }
        "copy" | "memcopy" | "hugecopy" => libc::MAP_PRIVATE,
        _ => libc::MAP_SHARED,
    };
    let file = match kind {
        "memfd" | "memcopy" => Some(memory_file(len, libc::MFD_CLOEXEC)?),
        "sealed" => Some(memory_file(len, libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)?),
        "hugetlb" | "hugecopy" => {
            Some(memory_file(len, libc::MFD_CLOEXEC | libc::MFD_HUGETLB | libc::MFD_HUGE_2MB)?)
        }
        "file" | "copy" => {
            let mut file = unnamed_file()?;
            file.set_len(len as u64)?;
            if kind == "copy" {
                file.write_all(&vec![0x11; len])?;
            }
            Some(file.into())
        }
        _ => None,
    };
    let fd = file.as_ref().map_or(-1, AsRawFd::as_raw_fd);
    let ask = if kind == "thp" { len + HUGE } else { len };
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: no address is given, so that nothing mapped is replaced; the descriptor, where there
    // is one, is open.
    let address = unsafe { libc::mmap(null_mut(), ask, access, flags, fd, 0) };
    if address == libc::MAP_FAILED {
        return Err(std::io::Error::last_os_error());
    }
    let mut address = address as usize;
    if kind == "thp" {
        address = address.next_multiple_of(HUGE);
        advise(address, len, libc::MADV_HUGEPAGE)?;
    } else if kind == "anon" {
        advise(address, len, libc::MADV_NOHUGEPAGE)?;
    }
    files.extend(file.map(|file| (address, len, file)));
    Ok(address)
}

fn churn(address: usize, len: usize, value: usize) {
    println!("@waiting");
    let pages = len / 4096;
    assert!(pages.is_power_of_two());
    for write in 0..pages {
        // An odd factor makes a permutation of it.
        let page = write.wrapping_mul(0x9e37_79b9) % pages;
        let at = (address + page * 4096) as *mut u64;
        // SAFETY: the test names memory that it had mapped here, writable, of that length; nothing
        // refers to it.
        unsafe { at.write_volatile(value as u64) };
    }
}

/// Threads that write each its own numbers, anywhere, a third of them over and over into a few
/// pages.
fn scribble(address: usize, len: usize, threads: usize, writes: usize, discards: usize) {
    println!("@waiting");
    let next = |random: &mut u64| {
        *random ^= *random << 13;
        *random ^= *random >> 7;
        *random ^= *random << 17;
        (*random >> 8) as usize
    };
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                let mut random = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(thread as u64 + 1);
                for write in 0..writes {
                    let reach = if write % 3 == 0 { len / 16 } else { len };
                    let at = address + next(&mut random) % (reach / 8) * 8;
                    // SAFETY: the test names memory that it had mapped here, writable, of that
                    // length; all threads write it by whole aligned words, and nothing refers to
                    // it.
                    unsafe { (*(at as *const AtomicU64)).store(random, Ordering::Relaxed) };
                }
            });
        }
        let mut random = 0x1234_5678_9abc_def1;
        for _ in 0..discards {
            let first = next(&mut random) % (len / 4096);
            let pages = (1 + next(&mut random) % 40).min(len / 4096 - first);
            advise(address + first * 4096, pages * 4096, libc::MADV_DONTNEED).expect("discard");
        }
    });
}

/// Two threads store, one has the kernel write, and one starts threads that end after 20 writes.
fn storm(address: usize, len: usize, time: Duration) -> std::io::Result<()> {
    let end = Instant::now() + time;
    let source = std::fs::File::open("/dev/urandom")?;
    println!("@waiting");
    let next = |random: &mut u64| {
        *random ^= *random << 13;
        *random ^= *random >> 7;
        *random ^= *random << 17;
        address + (*random >> 8) as usize % (len / 4096) * 4096
    };
    let store = |random: &mut u64| {
        let at = next(random) + 8;
        // SAFETY: the test names memory that it had mapped here, writable, of that length; threads
        // write this word of a page atomically, and nothing refers to it.
        unsafe { (*(at as *const AtomicU64)).fetch_add(1, Ordering::Relaxed) };
        if (*random).is_multiple_of(8) {
            std::thread::yield_now();
        }
    };
    std::thread::scope(|scope| {
        for thread in 1..=2_u64 {
            scope.spawn(move || {
                let mut random = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(thread);
                while Instant::now() < end {
                    store(&mut random);
                }
            });
        }
        scope.spawn(|| {
            let mut random = 0x0123_4567_89ab_cdef;
            while Instant::now() < end {
                let at = next(&mut random) + 64;
                // SAFETY: the same memory; only this thread has these bytes of a page written.
                unsafe { libc::read(source.as_raw_fd(), at as *mut libc::c_void, 32) };
            }
        });
        let mut random = 0x1357_9bdf_0246_8ace;
        while Instant::now() < end {
            let mut own = random;
            let short = scope.spawn(move || (0..20).for_each(|_| store(&mut own)));
            next(&mut random);
            short.join().expect("a thread of 20 writes");
            std::thread::sleep(Duration::from_millis(25));
        }
    });
    Ok(())
}

/// From here on under seccomp, by a filter of one instruction: allow.
fn filter() -> std::io::Result<()> {
    let mut allow = libc::sock_filter { code: 0x06, jt: 0, jf: 0, k: libc::SECCOMP_RET_ALLOW };
    let program = libc::sock_fprog { len: 1, filter: &raw mut allow };
    // SAFETY: takes numbers.
    check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }.into())?;
    // SAFETY: reads one `sock_fprog`, which `program` is, and the one instruction that it points
    // to; both live over the call.
    check(
        unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) }
            .into(),
    )
    .map(drop)
}

fn memory_file(len: usize, flags: libc::c_uint) -> std::io::Result<OwnedFd> {
    // SAFETY: the name is a C string; the answer is checked.
    let fd = check(unsafe { libc::memfd_create(c"guest-ram".as_ptr(), flags) }.into())?;
    // SAFETY: a new descriptor that nobody else owns.
    let file = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    let file = std::fs::File::from(file);
    file.set_len(len as u64)?;
    if flags & libc::MFD_ALLOW_SEALING != 0 {
        let fd = file.as_raw_fd();
        // SAFETY: an open descriptor; this command takes a number.
        let sealed = unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, libc::F_SEAL_SHRINK) };
        check(sealed.into())?;
    }
    Ok(file.into())
}

/// A file without a name in the current directory, which must be on a disk for `O_DIRECT`.
fn unnamed_file() -> std::io::Result<std::fs::File> {
    use std::os::unix::fs::OpenOptionsExt;
    std::fs::OpenOptions::new().read(true).write(true).custom_flags(libc::O_TMPFILE).open(".")
}

fn unmap(address: usize, len: usize) -> std::io::Result<()> {
    // SAFETY: the test names memory that it had mapped here; nothing refers to it.
    check(unsafe { libc::munmap(address as *mut _, len) }.into()).map(drop)
}

fn remap(address: usize, len: usize) -> std::io::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the test names memory that it had mapped here; nothing refers to it.
    let found = unsafe { libc::mmap(address as *mut _, len, access, flags, -1, 0) };
    if found == libc::MAP_FAILED { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

fn advise(address: usize, len: usize, advice: i32) -> std::io::Result<()> {
    // SAFETY: the test names memory that it had mapped here; nothing refers to its content.
    check(unsafe { libc::madvise(address as *mut _, len, advice) }.into()).map(drop)
}

fn punch(address: usize, len: usize, files: &Files) -> std::io::Result<()> {
    let (start, _, file) = files
        .iter()
        .find(|(start, len, _)| (*start..start + len).contains(&address))
        .expect("a mapped file");
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let (offset, len) = ((address - start).cast_signed() as i64, len.cast_signed() as i64);
    // SAFETY: an open descriptor; the rest are numbers.
    check(unsafe { libc::fallocate(file.as_raw_fd(), mode, offset, len) }.into()).map(drop)
}

/// The kernel writes the memory: read(2), which copies.
fn receive(address: usize, len: usize, byte: u8) -> std::io::Result<()> {
    let (mut from, mut to) = std::io::pipe()?;
    let sender = std::thread::spawn(move || to.write_all(&vec![byte; len]));
    // SAFETY: the test names memory that it had mapped here, writable, of that length; nothing else
    // refers to it.
    let memory = unsafe { std::slice::from_raw_parts_mut(address as *mut u8, len) };
    from.read_exact(memory)?;
    sender.join().expect("the sender")
}

/// The kernel writes the memory: `O_DIRECT`, which pins the pages and has the disk fill them.
fn direct(address: usize, len: usize, byte: u8) -> std::io::Result<()> {
    let mut file = unnamed_file()?;
    file.write_all(&vec![byte; len])?;
    file.sync_all()?;
    let fd = file.into_raw_fd();
    // SAFETY: an open descriptor; this command takes a number.
    check(unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_DIRECT) }.into())?;
    // SAFETY: the test names memory that it had mapped here, writable, of that length; nothing
    // refers to it.
    let got = check(unsafe { libc::pread(fd, address as *mut _, len, 0) } as i64)?;
    // SAFETY: the descriptor is ours and not used again.
    check(unsafe { libc::close(fd) }.into())?;
    if got as usize == len { Ok(()) } else { Err(std::io::Error::other("short read")) }
}

fn demote() -> std::io::Result<()> {
    const NOBODY: libc::uid_t = 65534;
    // SAFETY: takes numbers.
    check(unsafe { libc::setgroups(0, std::ptr::null()) }.into())?;
    // SAFETY: takes numbers.
    check(unsafe { libc::setresgid(NOBODY, NOBODY, NOBODY) }.into())?;
    // SAFETY: takes numbers.
    check(unsafe { libc::setresuid(NOBODY, NOBODY, NOBODY) }.into()).map(drop)
}

extern "C" fn on_signal(_: i32) {
    SIGNALS.fetch_add(1, Ordering::SeqCst);
}

/// One of the real-time signals, which queue; glibc and musl call different ones their first.
const COUNTED: libc::c_int = 36;

fn count() -> std::io::Result<()> {
    // SAFETY: all zeros is a value of this C structure.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_signal as extern "C" fn(i32) as usize;
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: the structure is initialised; the handler is safe in a signal, as it does one atomic
    // addition.
    check(unsafe { libc::sigaction(COUNTED, &raw const action, null_mut()) }.into()).map(drop)
}

/// One system call that waits for a time, and what it answered.
fn wait(kind: &str, ms: usize) -> String {
    println!("@waiting");
    wait_us(kind, ms * 1000)
}

fn wait_us(kind: &str, us: usize) -> String {
    let us = us.cast_signed() as i64;
    let time = libc::timespec { tv_sec: us / 1_000_000, tv_nsec: us % 1_000_000 * 1000 };
    let word = 0_u32;
    let code = match kind {
        // SAFETY: reads one timespec; a null remainder is allowed.
        "sleep" => unsafe { libc::syscall(libc::SYS_nanosleep, &raw const time, 0) },
        // SAFETY: no descriptors; reads and writes one timespec, here a copy of its own; no mask.
        "ppoll" => unsafe { libc::syscall(libc::SYS_ppoll, 0, 0, &raw const time, 0, 8) },
        // SAFETY: waits on a live word that nobody changes, for one timespec.
        _ => unsafe {
            let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
            libc::syscall(libc::SYS_futex, &raw const word, operation, 0, &raw const time)
        },
    };
    let errno =
        if code < 0 { std::io::Error::last_os_error().raw_os_error().unwrap_or(0) } else { 0 };
    format!("{code} {errno}")
}

/// A value that comes out wrong if any register was disturbed on the way.
fn spin(rounds: usize) -> u64 {
    let (mut a, mut b, mut x) = (1_u64, 0x9e37_79b9_7f4a_7c15_u64, 1.0_f64);
    for round in 0..rounds as u64 {
        a = a.rotate_left(7).wrapping_mul(b) ^ round;
        b = b.wrapping_add(a | 1).rotate_right(11);
        x = x * 1.000_000_1 + (a & 0xff) as f64 * 1e-9;
        if x > 2.0 {
            x -= 1.0;
        }
    }
    a ^ b ^ x.to_bits()
}

/// For that long, in the main thread and in so many others: computes and waits in turn, and checks
/// every result.
fn toil(ms: usize, threads: usize) -> String {
    println!("@waiting");
    let end = Instant::now() + Duration::from_millis(ms as u64);
    let work = move || {
        let mut steps = 0;
        let expected = spin(3000);
        while Instant::now() < end {
            step(expected)?;
            steps += 1;
        }
        Ok(steps)
    };
    let done = std::thread::scope(|scope| {
        let others: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let own: Result<u64, String> = work();
        others
            .into_iter()
            .map(|other| other.join().expect("it does not panic"))
            .fold(own, Result::and)
    });
    match done {
        Ok(steps) => format!("ok {steps}"),
        Err(what) => format!("wrong {what}"),
    }
}

fn step(expected: u64) -> Result<(), String> {
    let is = |what: &str, found: String, expected: &str| {
        if found == expected { Ok(()) } else { Err(format!("{what}: {found}, not {expected}")) }
    };
    is("checksum", spin(3000).to_string(), &expected.to_string())?;
    is("wide registers", wide_registers_hold().to_string(), "true")?;
    is("flags", flags_hold().to_string(), "true")?;
    is("nanosleep", wait_us("sleep", 60), "0 0")?;
    is("ppoll", wait_us("ppoll", 60), "0 0")?;
    is("futex", wait_us("futex", 60), "-1 110")?;
    // SAFETY: takes nothing.
    is("getppid", (unsafe { libc::getppid() } > 0).to_string(), "true")
}

/// True if the wide vector registers, both halves, hold what was put there while some ten
/// microseconds pass.
fn wide_registers_hold() -> bool {
    if !std::arch::is_x86_feature_detected!("avx") {
        return true;
    }
    let (put, mut got) =
        ([0x0123_4567_89ab_cdef_u64, 1, 2, 0xfedc_ba98_7654_3210], [[0_u64; 4]; 2]);
    // SAFETY: reads 32 bytes of `put` and writes 64 of `got`, both live; the registers used are
    // declared as changed; the processor has AVX.
    unsafe {
        std::arch::asm!(
            "vmovups ymm1, [{put}]", "vmovups ymm15, [{put}]",
            "2: dec {count}", "jnz 2b",
            "vmovups [{got}], ymm1", "vmovups [{got} + 32], ymm15", "vzeroupper",
            put = in(reg) put.as_ptr(), got = in(reg) got.as_mut_ptr(), count = inout(reg) 20_000_u64 => _,
            out("ymm1") _, out("ymm15") _, options(nostack),
        );
    }
    got == [put; 2]
}

/// True if the red zone below the stack pointer and the flags hold while some ten microseconds
/// pass.
fn flags_hold() -> bool {
    let (carry, zone): (u8, u64);
    // SAFETY: without `nostack` the compiler keeps nothing of its own in the red zone; 8 bytes of
    // it are used here.
    unsafe {
        std::arch::asm!(
            "mov qword ptr [rsp - 128], 77",
            "stc",
            "2: dec {count}", "jnz 2b",
            "setc {carry}", "mov {zone}, [rsp - 128]",
            count = inout(reg) 20_000_u64 => _, carry = out(reg_byte) carry, zone = out(reg) zone,
        );
    }
    carry == 1 && zone == 77
}
