//! System packages: found, installed where we may, asked for where we may not.

use std::path::Path;
use std::process::Command;

use crate::{Failure, process};

/// A thing that the machine must have, and the Debian package that brings it.
#[derive(Clone, Copy)]
pub(crate) struct Need {
    /// What it is, for the message.
    what: &'static str,
    /// Debian and Ubuntu package.
    package: &'static str,
    found: fn() -> bool,
}

const PYTHON3: Need = Need {
    what: "python3",
    package: "python3",
    found: || process::succeeds("python3", &["--version"]),
};
const PIP: Need = Need {
    what: "pip for python3",
    package: "python3-pip",
    found: || process::succeeds("python3", &["-m", "pip", "--version"]),
};
const COMPILER: Need = Need {
    what: "a C++ compiler (c++)",
    package: "g++",
    found: || process::succeeds("c++", &["--version"]),
};
const ZLIB: Need = Need {
    what: "zlib to link with",
    package: "zlib1g-dev",
    found: || linkable("libz.so"),
};
const ZSTD: Need = Need {
    what: "zstd to link with",
    package: "libzstd-dev",
    found: || linkable("libzstd.so"),
};

/// To fetch and unpack wheels.
pub(crate) const PYTHON: &[Need] = &[PYTHON3, PIP];

/// To link the static LLVM; its `llvm-config` is a Python script.
pub(crate) const LLVM: &[Need] = &[PYTHON3, PIP, COMPILER, ZLIB, ZSTD];

/// Makes sure that all of `needs` are there, or says what to install.
pub(crate) fn ensure(needs: &[Need]) -> Result<(), Failure> {
    let missing = missing(needs);
    if missing.is_empty() {
        return Ok(());
    }
    if can_install() {
        install(&missing)?;
    }
    let missing = self::missing(needs);
    if missing.is_empty() {
        Ok(())
    } else {
        Err(request(&missing).into())
    }
}

fn missing(needs: &[Need]) -> Vec<Need> {
    needs
        .iter()
        .filter(|need| !(need.found)())
        .copied()
        .collect()
}

/// Whether the linker finds a library: the compiler answers with a path, or with the bare name if there is none.
fn linkable(library: &str) -> bool {
    process::output(Command::new("c++").arg(format!("-print-file-name={library}")))
        .is_ok_and(|output| Path::new(String::from_utf8_lossy(&output.stdout).trim()).is_absolute())
}

/// Whether this is a Debian-like machine and we are root on it, as in a container.
fn can_install() -> bool {
    let root = process::output(Command::new("id").arg("-u")).is_ok_and(|id| id.stdout == b"0\n");
    root && process::succeeds("apt-get", &["--version"])
}

fn install(missing: &[Need]) -> Result<(), Failure> {
    let apt = || {
        let mut command = Command::new("apt-get");
        command.env("DEBIAN_FRONTEND", "noninteractive").arg("-qq");
        command
    };
    process::run(apt().arg("update"))?;
    let packages = missing.iter().map(|need| need.package);
    process::run(
        apt()
            .args(["install", "--yes", "--no-install-recommends"])
            .args(packages),
    )
}

fn request(missing: &[Need]) -> String {
    let what: Vec<_> = missing.iter().map(|need| need.what).collect();
    let packages: Vec<_> = missing.iter().map(|need| need.package).collect();
    format!(
        "this machine lacks {}; on Debian or Ubuntu: sudo apt-get install {}",
        what.join(", "),
        packages.join(" ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_request_names_what_is_missing_and_how_to_get_it() {
        assert_eq!(
            request(&[COMPILER, ZSTD]),
            "this machine lacks a C++ compiler (c++), zstd to link with; \
             on Debian or Ubuntu: sudo apt-get install g++ libzstd-dev"
        );
    }

    #[test]
    fn only_what_is_absent_is_missing() {
        let there = Need {
            what: "there",
            package: "there",
            found: || true,
        };
        let absent = Need {
            what: "absent",
            package: "absent",
            found: || false,
        };
        let names: Vec<_> = missing(&[there, absent])
            .iter()
            .map(|need| need.what)
            .collect();
        assert_eq!(names, ["absent"]);
    }
}
