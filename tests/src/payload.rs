//! The console lines of the firmware payload, computed on the host (guests/payload/README.md defines
//! them).

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
const START: u64 = 0x4B65_7966_7261_6D65;

/// One line that the payload printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassLine {
    /// The pass's number, from 1.
    pub n: u64,
    /// The sum after the pass.
    pub sum: u64,
}

/// The complete `pass N ok sum=HEX` lines among `lines`.
pub fn pass_lines(lines: &[String]) -> Vec<PassLine> {
    let parse = |line: &String| {
        let (n, hex) = line.strip_prefix("pass ")?.split_once(" ok sum=")?;
        (hex.len() == 16).then_some(())?;
        Some(PassLine { n: n.parse().ok()?, sum: u64::from_str_radix(hex, 16).ok()? })
    };
    lines.iter().filter_map(parse).collect()
}

/// The sequence from its first pass on.
pub struct PassSequence {
    generations: Vec<u64>,
    dirty: u64,
    page: usize,
    sums: Vec<u64>,
}

impl PassSequence {
    /// The sequence over `pages` pages, of which each pass writes `dirty`.
    pub fn new(pages: usize, dirty: u64) -> Self {
        Self { generations: vec![0; pages], dirty, page: 0, sums: Vec::new() }
    }

    /// The sum that pass `n` must print; the first is number 1.
    pub fn sum(&mut self, n: u64) -> u64 {
        assert!(n > 0, "there is no pass 0");
        while (self.sums.len() as u64) < n {
            self.advance();
        }
        self.sums[n as usize - 1]
    }

    /// Asserts that `lines` are consecutive and correct, and that there are at least `least`. Returns
    /// the first.
    pub fn check(&mut self, lines: &[PassLine], least: usize) -> PassLine {
        assert!(lines.len() >= least.max(1), "{} passes, expected at least {least}", lines.len());
        for (expected, line) in (lines[0].n..).zip(lines) {
            assert_eq!(line.n, expected, "a pass is missing or repeated");
            assert_eq!(
                line.sum,
                self.sum(line.n),
                "the sum of pass {} is wrong: a page was lost",
                line.n
            );
        }
        lines[0]
    }

    fn advance(&mut self) {
        let mut sum = self.sums.last().copied().unwrap_or(START);
        for _ in 0..self.dirty {
            let generation = &mut self.generations[self.page];
            let seed = GOLDEN.wrapping_mul(self.page as u64 + 1) ^ (*generation << 32);
            sum = mix(sum.wrapping_add(mix(seed)));
            *generation += 1;
            self.page = (self.page + 1) % self.generations.len();
        }
        self.sums.push(sum);
    }
}

fn mix(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first lines as guests/payload/README.md prints them.
    #[test]
    fn the_sequence_is_the_documented_one() {
        let mut sequence = PassSequence::new(1024, 1024);
        assert_eq!([1, 2].map(|n| sequence.sum(n)), [0xde81_b273_1f4d_09e6, 0xceaf_ce18_c9c7_b8f6]);
    }
}
