//! The sequence that the guest's `hash` workload prints, computed on the host (docs/guests.md
//! defines it).

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
const START: u64 = 0x4B65_7966_7261_6D65;
const STEPS: u32 = 4096;
const WORDS_PER_MIB: u64 = 131_072;
const PAGE_WORDS: u64 = 512;

/// One line that the guest printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HashLine {
    /// Its number.
    pub n: u64,
    /// The state after the line's steps.
    pub state: u64,
}

/// The complete `hash N HEX` lines among `lines`.
pub fn hash_lines(lines: &[String]) -> Vec<HashLine> {
    let parse = |line: &String| {
        let mut words = line.strip_prefix("hash ")?.split(' ');
        let (n, hex) = (words.next()?.parse().ok()?, words.next()?);
        (hex.len() == 16 && words.next().is_none()).then_some(())?;
        Some(HashLine { n, state: u64::from_str_radix(hex, 16).ok()? })
    };
    lines.iter().filter_map(parse).collect()
}

/// The sequence from its first line on.
pub struct Sequence {
    table: Vec<u64>,
    state: u64,
    states: Vec<u64>,
}

impl Sequence {
    /// The sequence over a table of `mib` MiB.
    pub fn new(mib: u64) -> Self {
        let words = mib * WORDS_PER_MIB;
        let table = (0..words).map(|i| mix(GOLDEN.wrapping_mul(i + 1))).collect();
        Self { table, state: START, states: Vec::new() }
    }

    /// The state that line `n` must print; the first line is number 1.
    pub fn line(&mut self, n: u64) -> u64 {
        assert!(n > 0, "there is no line 0");
        while (self.states.len() as u64) < n {
            self.advance();
        }
        self.states[n as usize - 1]
    }

    /// Asserts that `lines` are consecutive and correct, and that there are at least `least`.
    pub fn check(&mut self, lines: &[HashLine], least: usize) {
        assert!(lines.len() >= least, "{} lines, expected at least {least}", lines.len());
        let first = lines[0].n;
        for (expected, line) in (first..).zip(lines) {
            assert_eq!(line.n, expected, "a line is missing or repeated");
            assert_eq!(line.state, self.line(line.n), "line {} is wrong: a page was lost", line.n);
        }
    }

    fn advance(&mut self) {
        let words = self.table.len() as u64;
        for _ in 0..STEPS {
            let at = (((self.state >> 32) * words) >> 32) as usize;
            let head = at & !(PAGE_WORDS as usize - 1);
            self.state = mix(self.state.wrapping_add(self.table[at]).wrapping_add(GOLDEN));
            self.table[at] = self.table[at].wrapping_add(self.state);
            self.state = mix(self.state ^ self.table[head]);
            self.table[head] = self.table[head].wrapping_add(self.state);
        }
        self.states.push(self.state);
    }
}

/// splitmix64's finaliser.
pub fn mix(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first lines of the guest's default table, as docs/guests.md prints them.
    #[test]
    fn the_sequence_is_the_documented_one() {
        let mut sequence = Sequence::new(16);
        assert_eq!(
            [1, 2, 3].map(|n| sequence.line(n)),
            [0xa458_aba9_834a_b022, 0x0d94_f01c_224f_a622, 0xcf76_a3f0_463a_977b]
        );
    }
}
