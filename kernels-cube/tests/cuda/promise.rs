//! What is promised of the code of a kernel, and the test of it.

use crate::tools::Usage;

/// What must hold of every kernel that one call launches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Promise {
    /// The kernels, in order of launch.
    pub(crate) kernels: &'static [&'static str],
    /// The most registers of one unit.
    max_registers: u32,
    /// The most bytes of local memory of one unit.
    max_local_bytes: u32,
    /// The most bytes that loads and stores of spilled registers move.
    max_spill_bytes: u32,
    /// The kernel whose products run on tensor cores, if they do: others begin a count, or merge parts.
    tensor_cores: Option<&'static str>,
}

impl Promise {
    /// Exactly `kernels`, within `max_registers`, without spills and local memory.
    pub(crate) const fn new(kernels: &'static [&'static str], max_registers: u32) -> Self {
        Self {
            kernels,
            max_registers,
            max_local_bytes: 0,
            max_spill_bytes: 0,
            tensor_cores: None,
        }
    }

    /// The same, with products on tensor cores in the first kernel.
    pub(crate) const fn on_tensor_cores(self) -> Self {
        let first = self.kernels[0];
        self.with_tensor_cores_in(first)
    }

    /// The same, with products on tensor cores in `kernel`.
    pub(crate) const fn with_tensor_cores_in(mut self, kernel: &'static str) -> Self {
        self.tensor_cores = Some(kernel);
        self
    }

    /// The same, with up to `bytes` of local memory and `spill_bytes` of spills, for the reason
    /// given.
    pub(crate) const fn with_local_memory(
        mut self,
        bytes: u32,
        spill_bytes: u32,
        _why: &'static str,
    ) -> Self {
        self.max_local_bytes = bytes;
        self.max_spill_bytes = spill_bytes;
        self
    }

    /// What `usage` breaks.
    pub(crate) fn broken(&self, kernel: &str, usage: &Usage) -> Vec<String> {
        let mut broken = Vec::new();
        let mut at_most = |what: &str, value: u32, limit: u32| {
            if value > limit {
                broken.push(format!("{value} {what}, promised at most {limit}"));
            }
        };
        at_most("registers", usage.registers, self.max_registers);
        at_most(
            "bytes of local memory",
            usage.local_bytes,
            self.max_local_bytes,
        );
        at_most("bytes of spills", usage.spill_bytes, self.max_spill_bytes);
        if self.max_local_bytes == 0 {
            at_most("accesses of local memory", usage.local_accesses, 0);
        }
        at_most(
            "accesses of local memory in the loop over products",
            usage.local_accesses_in_loop,
            0,
        );
        let multiplies = self
            .tensor_cores
            .is_some_and(|name| kernel.starts_with(name));
        if multiplies && usage.hmma + usage.hgmma == 0 {
            broken.push("no tensor core instruction, promised some".to_owned());
        }
        broken
    }
}

#[test]
fn each_broken_promise_is_named() {
    let plain = Usage {
        registers: 40,
        ..Usage::default()
    };
    let promise = Promise::new(&["k"], 40);
    assert!(promise.broken("k", &plain).is_empty());
    let more = Usage {
        registers: 41,
        local_bytes: 8,
        spill_bytes: 4,
        local_accesses: 2,
        ..plain
    };
    let broken = promise.broken("k", &more);
    assert_eq!(broken.len(), 4, "{broken:?}");
    let granted = Promise::new(&["k"], 40).with_local_memory(8, 4, "outside of the loop");
    let in_loop = Usage {
        registers: 40,
        local_accesses_in_loop: 1,
        ..more
    };
    assert_eq!(granted.broken("k", &in_loop).len(), 1);
}

#[test]
fn tensor_cores_must_be_used_where_they_are_promised() {
    let promise = Promise::new(&["k"], 40).on_tensor_cores();
    let with = |hmma, hgmma| Usage {
        hmma,
        hgmma,
        ..Usage::default()
    };
    assert_eq!(promise.broken("k", &with(0, 0)).len(), 1);
    assert!(promise.broken("k", &with(1, 0)).is_empty());
    assert!(promise.broken("k", &with(0, 1)).is_empty());
}

#[test]
fn granted_local_memory_grants_no_spills() {
    let promise = Promise::new(&["k"], 40).with_local_memory(512, 0, "a loop");
    let local = Usage {
        local_bytes: 512,
        local_accesses: 9,
        ..Usage::default()
    };
    assert!(promise.broken("k", &local).is_empty());
    let spilled = Usage {
        spill_bytes: 4,
        ..local
    };
    assert_eq!(promise.broken("k", &spilled).len(), 1);
}
