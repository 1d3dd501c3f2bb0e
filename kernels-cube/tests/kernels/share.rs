//! Shares of a table of cases, which several processes run side by side: a runtime compiles one kernel after the other.

/// Every `step`-th case, from the `first` on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Share {
    pub(crate) first: usize,
    pub(crate) step: usize,
}

impl Share {
    /// That of this process, `first/step` in `BURN_PAGED_CASES`; without it, all cases.
    pub(crate) fn of_this_process() -> Self {
        let Ok(share) = std::env::var("BURN_PAGED_CASES") else {
            return Self { first: 0, step: 1 };
        };
        let (first, step) = share.split_once('/').expect("BURN_PAGED_CASES is n/of");
        let number = |text: &str| text.parse().expect("BURN_PAGED_CASES is n/of");
        let (first, step) = (number(first), number(step));
        assert!(first < step, "BURN_PAGED_CASES is {first}/{step}");
        Self { first, step }
    }
}
