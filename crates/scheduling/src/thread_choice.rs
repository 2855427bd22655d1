//! Chooses the number of copying threads: it tries 1, 2, 4, ..., keeps the fastest, and tries the
//! others again from time to time.

/// Every this many copies, another number of threads is tried again.
const LOOK_AGAIN_EVERY: u64 = 32;

/// Chooses the number of threads of a copy by the measured speed of each number.
#[derive(Clone, Debug)]
pub struct ThreadChoice {
    /// Each number of threads with its nanoseconds per page; `None` until it was tried.
    tried: Vec<(usize, Option<f64>)>,
    copies: u64,
}

impl ThreadChoice {
    /// Creates a choice among 1, 2, 4, ... up to `max` threads.
    pub fn new(max: usize) -> Self {
        let numbers = std::iter::successors(Some(1_usize), |n| n.checked_mul(2))
            .take_while(|n| *n <= max.max(1));
        Self { tried: numbers.map(|n| (n, None)).collect(), copies: 0 }
    }

    /// Returns the number of threads for the next copy.
    pub fn choose(&mut self) -> usize {
        self.copies += 1;
        if let Some((untried, _)) = self.tried.iter().find(|(_, ns)| ns.is_none()) {
            return *untried;
        }
        if self.copies.is_multiple_of(LOOK_AGAIN_EVERY) {
            let turn = (self.copies / LOOK_AGAIN_EVERY) as usize % self.tried.len();
            return self.tried.get(turn).map_or(1, |(n, _)| *n);
        }
        let fastest =
            self.tried.iter().min_by(|a, b| a.1.unwrap_or(0.0).total_cmp(&b.1.unwrap_or(0.0)));
        fastest.map_or(1, |(n, _)| *n)
    }

    /// Records that copying `pages` pages with `threads` threads took `took_ns` nanoseconds.
    pub fn learn(&mut self, threads: usize, pages: u64, took_ns: u64) {
        let ns = took_ns as f64 / pages.max(1) as f64;
        if let Some((_, mean)) = self.tried.iter_mut().find(|(n, _)| *n == threads) {
            *mean = Some(mean.map_or(ns, |mean| (3.0 * mean + ns) / 4.0));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_number_of_threads_is_found_and_given_up_when_it_is_not_any_more() {
        let mut choice = ThreadChoice::new(4);
        let mut chosen = |best: usize| {
            let mut counts = [0; 5];
            for _ in 0..400 {
                let threads = choice.choose();
                counts[threads] += 1;
                choice.learn(threads, 1000, if threads == best { 500_000 } else { 900_000 });
            }
            counts
        };
        assert!(chosen(2)[2] > 370);
        let later = chosen(4);
        assert!(later[4] > later[2], "it never looked again: {later:?}");
        assert_eq!(ThreadChoice::new(0).choose(), 1);
    }
}
