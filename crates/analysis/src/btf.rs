//! Finds where a Linux kernel keeps the running task, from the kernel's type information (BTF,
//! Documentation/bpf/btf.rst) in a `vmlinux` or a copy of `/sys/kernel/btf/vmlinux`.
//!
//! ```text
//!   header   magic eb9f │ version, flags │ header length │ types: offset, length │
//!            strings: offset, length
//!   types    name │ kind, number of members │ size or type │ members ...          numbered from 1
//!
//!   struct task_struct ── pid, tgid, comm ──▶ offsets      including members of unnamed structures
//!   section .data..percpu ── current_task ──▶ offset      (aarch64: its plugin needs none)
//!                            (Linux 6.2 to 6.14: pcpu_hot.current_task)
//! ```
//!
//! Offsets in the header count from its end. Per-CPU variables have a section of their own. It
//! begins at address 0 up to Linux 6.14; later the ELF file tells its address.

use object::{Object, ObjectSection};

const MAGIC: [u8; 2] = [0x9f, 0xeb];
/// The most types: a kernel has about 200,000.
const TYPES_MAX: usize = 1 << 24;
/// The deepest nesting of unnamed structures.
const DEPTH_MAX: usize = 8;
const PER_CPU: &str = ".data..percpu";
/// The per-CPU variable with the running task of aarch64, which the plugin finds by itself.
const AARCH64_TASK: &str = "__entry_task";

const KIND_INT: u32 = 1;
const KIND_ARRAY: u32 = 3;
const KIND_STRUCT: u32 = 4;
const KIND_UNION: u32 = 5;
const KIND_ENUM: u32 = 6;
const KIND_PROTO: u32 = 13;
const KIND_VAR: u32 = 14;
const KIND_SECTION: u32 = 15;
const KIND_DECL_TAG: u32 = 17;
const KIND_ENUM64: u32 = 19;

/// Where a kernel keeps the running task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TaskLayout {
    /// The address of the per-CPU variable that points to the running task; 0 for aarch64.
    pub current: u64,
    /// Offset of the thread id in `struct task_struct`, in bytes.
    pub pid: u64,
    /// Offset of the process id in `struct task_struct`, in bytes.
    pub tgid: u64,
    /// Offset of the thread's name in `struct task_struct`, in bytes.
    pub comm: u64,
}

impl TaskLayout {
    /// Finds where the kernel keeps the running task. `bytes` are the contents of a `vmlinux`, or
    /// its type information (BTF) alone. The error tells as a text what is missing.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        if bytes.starts_with(&MAGIC) {
            return Self::from_types(&Types::parse(bytes)?, 0);
        }
        if !crate::symbols::is_elf(bytes) {
            return Err("not a vmlinux, nor a copy of /sys/kernel/btf/vmlinux".into());
        }
        let file = object::File::parse(bytes).map_err(|error| error.to_string())?;
        let section = file.section_by_name(".BTF").ok_or("no type information (section .BTF)")?;
        let types = section.uncompressed_data().map_err(|error| error.to_string())?;
        let per_cpu = file.section_by_name(PER_CPU).map_or(0, |section| section.address());
        Self::from_types(&Types::parse(&types)?, per_cpu)
    }

    fn from_types(types: &Types<'_>, per_cpu: u64) -> Result<Self, String> {
        let offset = |structure: &str, member: &str| {
            let found = types
                .structure(structure)
                .ok_or_else(|| format!("no struct {structure} in the type information"))?;
            let offset = types.member(found, member, DEPTH_MAX);
            offset.ok_or_else(|| format!("struct {structure} has no member {member}"))
        };
        let current = match (types.variable("current_task"), types.variable("pcpu_hot")) {
            (Some(at), _) => at,
            (None, Some(at)) => at + offset("pcpu_hot", "current_task")?,
            (None, None) if types.variable(AARCH64_TASK).is_some() => 0,
            (None, None) => return Err("no per-CPU variable current_task".into()),
        };
        let [pid, tgid, comm] = ["pid", "tgid", "comm"].map(|member| offset("task_struct", member));
        Ok(Self { current: per_cpu.wrapping_add(current), pid: pid?, tgid: tgid?, comm: comm? })
    }
}

/// A type, as it is encoded.
#[derive(Clone, Copy)]
struct Type<'a> {
    name: u32,
    kind: u32,
    /// True if the offsets of members have the length of a bit field in their upper bits.
    has_bit_fields: bool,
    /// Its members, three words each, or other data of its kind.
    behind: &'a [u8],
}

impl Type<'_> {
    fn triples(&self) -> impl Iterator<Item = [u32; 3]> {
        self.behind
            .as_chunks::<12>()
            .0
            .iter()
            .filter_map(|words| Some([number(words, 0)?, number(words, 4)?, number(words, 8)?]))
    }
}

/// All types of a kernel.
struct Types<'a> {
    /// The type with number 1 comes first.
    all: Vec<Type<'a>>,
    strings: &'a [u8],
}

impl<'a> Types<'a> {
    fn parse(bytes: &'a [u8]) -> Result<Self, String> {
        let short = || "the type information is truncated".to_owned();
        if !bytes.starts_with(&MAGIC) || bytes.get(2) != Some(&1) {
            return Err("the type information is not version 1, or big-endian".into());
        }
        let [header_len, types_at, types_len, strings_at, strings_len] = [4, 8, 12, 16, 20]
            .map(|at| number(bytes, at).map_or(usize::MAX, |number| number as usize));
        let part = |at: usize, len: usize| {
            let start = header_len.checked_add(at)?;
            bytes.get(start..start.checked_add(len)?)
        };
        let mut types = part(types_at, types_len).ok_or_else(short)?;
        let strings = part(strings_at, strings_len).ok_or_else(short)?;
        let mut all = Vec::new();
        while !types.is_empty() {
            let (one, rest) = next_type(types).ok_or_else(short)?;
            all.push(one);
            types = rest;
            if all.len() > TYPES_MAX {
                return Err(format!("more than {TYPES_MAX} types"));
            }
        }
        Ok(Self { all, strings })
    }

    fn get(&self, id: u32) -> Option<&Type<'a>> {
        self.all.get((id as usize).checked_sub(1)?)
    }

    /// Whether the string at offset `at` is `name`.
    fn is(&self, at: u32, name: &str) -> bool {
        let rest =
            self.strings.get(at as usize..).and_then(|rest| rest.strip_prefix(name.as_bytes()));
        rest.is_some_and(|rest| rest.first() == Some(&0))
    }

    fn structure(&self, name: &str) -> Option<&Type<'a>> {
        self.all.iter().find(|one| one.kind == KIND_STRUCT && self.is(one.name, name))
    }

    /// The offset of a member in bytes. Members of unnamed structures and unions count as its own.
    fn member(&self, structure: &Type<'a>, name: &str, depth: usize) -> Option<u64> {
        let depth = depth.checked_sub(1)?;
        if !matches!(structure.kind, KIND_STRUCT | KIND_UNION) {
            return None;
        }
        structure.triples().find_map(|[member, kind, offset]| {
            let bits = if structure.has_bit_fields { offset & 0xff_ffff } else { offset };
            let offset = u64::from(bits / 8);
            if self.is(member, "") {
                return Some(offset + self.member(self.get(kind)?, name, depth)?);
            }
            self.is(member, name).then_some(offset)
        })
    }

    /// The offset of a per-CPU variable in its section.
    fn variable(&self, name: &str) -> Option<u64> {
        let section =
            self.all.iter().find(|one| one.kind == KIND_SECTION && self.is(one.name, PER_CPU))?;
        section.triples().find_map(|[variable, offset, _]| {
            let variable = self.get(variable)?;
            (variable.kind == KIND_VAR && self.is(variable.name, name)).then_some(offset.into())
        })
    }
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    let word = bytes.get(at..at.checked_add(4)?)?;
    word.try_into().ok().map(u32::from_le_bytes)
}

/// Splits the first type off.
fn next_type(types: &[u8]) -> Option<(Type<'_>, &[u8])> {
    let [name, info] = [0, 4].map(|at| number(types, at));
    let (name, info) = (name?, info?);
    number(types, 8)?;
    let (members, kind) = ((info & 0xffff) as usize, info >> 24 & 0x1f);
    let len = match kind {
        KIND_INT | KIND_VAR | KIND_DECL_TAG => 4,
        KIND_ARRAY => 12,
        KIND_STRUCT | KIND_UNION | KIND_SECTION | KIND_ENUM64 => 12 * members,
        KIND_ENUM | KIND_PROTO => 8 * members,
        _ if kind > KIND_ENUM64 => return None,
        _ => 0,
    };
    let (behind, rest) = types.get(12..)?.split_at_checked(len)?;
    Some((Type { name, kind, has_bit_fields: info >> 31 == 1, behind }, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Type information under construction.
    #[derive(Default)]
    struct Made {
        types: Vec<u8>,
        strings: Vec<u8>,
    }

    impl Made {
        fn name(&mut self, name: &str) -> u32 {
            let at = self.strings.len() as u32;
            self.strings.extend(name.bytes().chain([0]));
            at
        }

        fn add(&mut self, name: &str, info: u32, size: u32, behind: &[u32]) {
            let name = self.name(name);
            let words = [name, info, size].into_iter().chain(behind.iter().copied());
            self.types.extend(words.flat_map(u32::to_le_bytes));
        }

        fn bytes(&self) -> Vec<u8> {
            let (types, strings) = (self.types.len() as u32, self.strings.len() as u32);
            let mut bytes = vec![0x9f, 0xeb, 1, 0];
            bytes.extend([24, 0, types, types, strings].into_iter().flat_map(u32::to_le_bytes));
            [&bytes[..], &self.types, &self.strings].concat()
        }
    }

    /// The relevant types of a kernel: `current_task` at 64, or in `pcpu_hot` at 128 + 8; pid at
    /// 100, tgid at 104, comm at 200.
    fn kernel(has_hot: bool) -> Vec<u8> {
        let mut made = Made::default();
        made.name("");
        made.add("int", KIND_INT << 24, 4, &[32]);
        // An unnamed structure of two members: type 2.
        let (pid, tgid, comm, none) = (made.name("pid"), made.name("tgid"), made.name("comm"), 0);
        made.add("", KIND_STRUCT << 24 | 2, 8, &[pid, 1, 0, tgid, 1, 32]);
        made.add(
            "task_struct",
            1 << 31 | KIND_STRUCT << 24 | 2,
            300,
            &[none, 2, 800, comm, 1, 1600],
        );
        let current = made.name("current_task");
        made.add("pcpu_hot", KIND_STRUCT << 24 | 1, 64, &[current, 1, 64]);
        made.add(if has_hot { "pcpu_hot" } else { "current_task" }, KIND_VAR << 24, 4, &[1]);
        made.add("other", KIND_VAR << 24, 1, &[1]);
        let at = if has_hot { 128 } else { 64 };
        made.add(PER_CPU, KIND_SECTION << 24 | 2, 0, &[6, 32, 4, 5, at, 8]);
        made.bytes()
    }

    #[test]
    fn offsets_are_found_in_both_kinds_of_kernels() {
        let expected = TaskLayout { current: 64, pid: 100, tgid: 104, comm: 200 };
        assert_eq!(TaskLayout::parse(&kernel(false)), Ok(expected));
        assert_eq!(TaskLayout::parse(&kernel(true)), Ok(TaskLayout { current: 136, ..expected }));
    }

    #[test]
    fn missing_or_damaged_type_information_is_an_error() {
        assert!(
            TaskLayout::parse(b"ffffffff81000000 T _text\n").unwrap_err().contains("not a vmlinux")
        );
        let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert!(TaskLayout::parse(&own).unwrap_err().contains(".BTF"));
        let whole = kernel(true);
        let without = Made::default().bytes();
        assert!(TaskLayout::parse(&without).unwrap_err().contains("current_task"));
        for len in 0..whole.len() {
            assert!(TaskLayout::parse(&whole[..len]).is_err(), "{len} bytes");
        }
        for at in 0..whole.len() {
            let mut broken = whole.clone();
            for value in [0xff, 0x7f, 0, 0x1f] {
                broken[at] = value;
                // Any result is right, but the parser must end.
                let _ = TaskLayout::parse(&broken);
            }
        }
    }
}
