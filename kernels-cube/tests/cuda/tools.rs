//! The compilers of CUDA: NVRTC, ptxas and nvdisasm, out of a folder that `cargo xtask cuda-tools`
//! fills.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::ptr;

use libloading::{Library, Symbol};

/// Architecture of the code, in full: only `a` has warpgroup instructions.
const ARCHITECTURE: &str = "sm_90a";

/// What the code of one kernel takes, per unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) registers: u32,
    /// The stack frame: arrays with indices that are not constant, and spills.
    pub(crate) local_bytes: u32,
    /// Bytes of stores and loads of registers that did not fit.
    pub(crate) spill_bytes: u32,
    /// Instructions that touch local memory.
    pub(crate) local_accesses: u32,
    /// Those of them in the loop that waits for all products of four warps but the last.
    pub(crate) local_accesses_in_loop: u32,
    /// Tensor core instructions of one warp.
    pub(crate) hmma: u32,
    /// Tensor core instructions of four warps.
    pub(crate) hgmma: u32,
}

impl Usage {
    /// Reads what ptxas says with `-v`, and the disassembly.
    fn parse(report: &str, assembly: &str) -> Result<Self, String> {
        let before = |unit: &str| {
            let at = report.find(unit)?;
            report[..at].split_whitespace().last()?.parse::<u32>().ok()
        };
        let number = |unit: &str| before(unit).ok_or_else(|| format!("no {unit:?} in {report}"));
        let count = |opcode: &str| {
            let opcodes = assembly.split_whitespace();
            opcodes.filter(|word| word.starts_with(opcode)).count() as u32
        };
        Ok(Self {
            registers: number("registers")?,
            local_bytes: number("bytes stack frame")?,
            spill_bytes: number("bytes spill stores")? + number("bytes spill loads")?,
            local_accesses: count("LDL") + count("STL"),
            local_accesses_in_loop: local_accesses_in_loop(assembly),
            hmma: count("HMMA"),
            hgmma: count("HGMMA"),
        })
    }
}

/// From where the branch back leads that follows such a wait, to that branch; without one, from the wait to the next products.
fn local_accesses_in_loop(assembly: &str) -> u32 {
    let lines: Vec<&str> = assembly.lines().collect();
    let find = |from: usize, text: &str| {
        let at = lines[from..].iter().position(|line| line.contains(text));
        at.map(|at| from + at)
    };
    let Some(wait) = find(0, "DEPBAR.LE gsb0, 0x1") else {
        return 0;
    };
    let target = |line: &str| {
        let label = line.split_once("`(")?.1.split_once(')')?.0;
        let label = format!("{label}:");
        lines[..wait].iter().position(|line| *line == label)
    };
    let back = (wait..lines.len()).find_map(|at| Some((target(lines[at])?, at)));
    let (begin, end) = back.unwrap_or((wait, find(wait, "HGMMA").unwrap_or(lines.len())));
    let is_local = |line: &&&str| line.contains("LDL") || line.contains("STL");
    lines[begin..end].iter().filter(is_local).count() as u32
}

/// A folder with `bin`, `include` and `lib` of a CUDA toolkit.
pub(crate) struct Tools {
    root: PathBuf,
    nvrtc: Nvrtc,
}

impl Tools {
    pub(crate) fn load(root: &Path) -> Result<Self, String> {
        Ok(Self {
            root: root.to_path_buf(),
            nvrtc: Nvrtc::load(&root.join("lib"))?,
        })
    }

    /// Compiles and assembles `source`. Leaves `<stem>.cu`, `.ptx`, `.cubin`, `.sass` and `.txt`, the
    /// report of the assembler; where they are there already for this source, they are read.
    pub(crate) fn usage(&self, source: &str, stem: &Path) -> Result<Usage, String> {
        let path = |extension: &str| stem.with_extension(extension);
        let read = |extension: &str| std::fs::read_to_string(path(extension)).ok();
        let write = |extension: &str, text: &[u8]| {
            let path = path(extension);
            std::fs::write(&path, text)
                .map_err(|error| format!("cannot write {}: {error}", path.display()))
        };
        let stamped = format!("// {ARCHITECTURE}, {}\n{source}", self.root.display());
        if read("cu").as_ref() == Some(&stamped)
            && let (Some(report), Some(assembly)) = (read("txt"), read("sass"))
        {
            return Usage::parse(&report, &assembly);
        }

        // The report goes first and comes last, so that files of two sources never count as one set.
        if path("txt").exists() {
            std::fs::remove_file(path("txt")).map_err(|error| error.to_string())?;
        }
        write("cu", stamped.as_bytes())?;
        write(
            "ptx",
            self.nvrtc
                .ptx(source, &self.root.join("include"))?
                .as_bytes(),
        )?;
        let arch = format!("-arch={ARCHITECTURE}");
        let assembler = self.run(
            Command::new(self.root.join("bin/ptxas"))
                .args([&arch, "-v", "-o"])
                .args([path("cubin"), path("ptx")]),
        )?;
        let disassembler = self.run(
            Command::new(self.root.join("bin/nvdisasm"))
                .arg("-c")
                .arg(path("cubin")),
        )?;
        write("sass", &disassembler.stdout)?;
        write("txt", &assembler.stderr)?;
        Usage::parse(
            &String::from_utf8_lossy(&assembler.stderr),
            &String::from_utf8_lossy(&disassembler.stdout),
        )
    }

    fn run(&self, command: &mut Command) -> Result<Output, String> {
        let output = command
            .output()
            .map_err(|error| format!("cannot start {command:?}: {error}"))?;
        if output.status.success() {
            return Ok(output);
        }
        let text = String::from_utf8_lossy(&output.stderr);
        Err(format!("{command:?}: {text}"))
    }
}

type Program = *mut c_void;
type Status = c_int;

/// The functions of NVRTC that we call.
struct Nvrtc {
    library: Library,
    /// NVRTC loads it by name alone, which finds it only if it is loaded already.
    _builtins: Library,
}

impl Nvrtc {
    fn load(folder: &Path) -> Result<Self, String> {
        let load = |name: &str| {
            let path = folder.join(name);
            // SAFETY: the initialisers of these libraries have no requirements.
            unsafe { Library::new(&path) }
                .map_err(|error| format!("cannot load {}: {error}", path.display()))
        };
        Ok(Self {
            _builtins: load("libnvrtc-builtins.so.13.0")?,
            library: load("libnvrtc.so.13")?,
        })
    }

    /// Compiles as `cubecl-cuda` does.
    fn ptx(&self, source: &str, include: &Path) -> Result<String, String> {
        let options = [
            format!("--gpu-architecture={ARCHITECTURE}"),
            format!("--include-path={}", include.display()),
            "-lineinfo".to_owned(),
            format!("--include-path={}", include.join("cccl").display()),
        ];
        let options: Vec<CString> = options
            .into_iter()
            .map(c_string)
            .collect::<Result<_, _>>()?;
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let source = c_string(source.to_owned())?;

        let mut program: Program = ptr::null_mut();
        // SAFETY: the signatures are those of nvrtc.h; every string ends with a zero and outlives
        // the calls; a program is used only between its creation and its end.
        unsafe {
            let create: Symbol<
                unsafe extern "C" fn(
                    *mut Program,
                    *const c_char,
                    *const c_char,
                    c_int,
                    *const *const c_char,
                    *const *const c_char,
                ) -> Status,
            > = self.symbol(c"nvrtcCreateProgram")?;
            let compile: Symbol<
                unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Status,
            > = self.symbol(c"nvrtcCompileProgram")?;
            let destroy: Symbol<unsafe extern "C" fn(*mut Program) -> Status> =
                self.symbol(c"nvrtcDestroyProgram")?;

            let no_headers = ptr::null();
            let created = create(
                &mut program,
                source.as_ptr(),
                ptr::null(),
                0,
                no_headers,
                no_headers,
            );
            if created != 0 {
                return Err(format!("NVRTC makes no program: error {created}"));
            }
            let result = match compile(program, options.len() as c_int, options.as_ptr()) {
                0 => self.text(program, c"nvrtcGetPTXSize", c"nvrtcGetPTX"),
                _ => Err(self.text(program, c"nvrtcGetProgramLogSize", c"nvrtcGetProgramLog")?),
            };
            destroy(&mut program);
            result
        }
    }

    /// One of the texts that NVRTC keeps of a program.
    ///
    /// # Safety
    /// `program` is one that exists, and the functions are a pair of size and text.
    unsafe fn text(&self, program: Program, size: &CStr, text: &CStr) -> Result<String, String> {
        // SAFETY: the signatures are those of nvrtc.h; the buffer has the size that NVRTC names.
        unsafe {
            let get_size: Symbol<unsafe extern "C" fn(Program, *mut usize) -> Status> =
                self.symbol(size)?;
            let get_text: Symbol<unsafe extern "C" fn(Program, *mut c_char) -> Status> =
                self.symbol(text)?;
            let mut size = 0;
            if get_size(program, &mut size) != 0 {
                return Err("NVRTC names no size".to_owned());
            }
            let mut bytes = vec![0u8; size.max(1)];
            if get_text(program, bytes.as_mut_ptr().cast()) != 0 {
                return Err("NVRTC gives no text".to_owned());
            }
            let text = CStr::from_bytes_until_nul(&bytes).map_err(|error| error.to_string())?;
            Ok(text.to_string_lossy().into_owned())
        }
    }

    /// # Safety
    /// `T` is the signature of the function.
    unsafe fn symbol<T>(&self, name: &CStr) -> Result<Symbol<'_, T>, String> {
        // SAFETY: the caller promises the signature.
        unsafe { self.library.get(name.to_bytes_with_nul()) }
            .map_err(|error| format!("{name:?}: {error}"))
    }
}

fn c_string(text: String) -> Result<CString, String> {
    CString::new(text).map_err(|error| error.to_string())
}

#[test]
fn the_report_of_the_assembler_is_read() {
    let report = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 24 registers, used 1 barriers, 16 bytes cumulative stack size";
    let assembly = "\
        /*0010*/  HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0020*/  @P0 STL [R1], R2 ;
        /*0030*/  LDL.64 R2, [R1] ;
        /*0040*/  HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4] ;";
    let usage = Usage {
        registers: 24,
        local_bytes: 16,
        spill_bytes: 12,
        local_accesses: 2,
        local_accesses_in_loop: 0,
        hmma: 1,
        hgmma: 1,
    };
    assert_eq!(Usage::parse(report, assembly), Ok(usage));
    assert!(Usage::parse("nothing", assembly).is_err());
}

#[test]
fn local_memory_in_the_loop_over_products_is_counted() {
    let assembly = "\
LDL R0, [R1] ;
.L_x_7:
@P0 BRA `(.L_x_8) ;
STL [R1], R0 ;
.L_x_8:
HGMMA R24 ;
WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
@P1 BRA `(.L_x_9) ;
LDL R0, [R1] ;
.L_x_9:
@P0 BRA `(.L_x_7) ;
LDL R0, [R1] ;
HGMMA R24 ;";
    assert_eq!(local_accesses_in_loop(assembly), 2);
    let straight = "WARPGROUP.DEPBAR.LE gsb0, 0x1 ;\nSTL [R1], R0 ;\nHGMMA R24 ;\nLDL R0, [R1] ;";
    assert_eq!(local_accesses_in_loop(straight), 1);
    assert_eq!(local_accesses_in_loop("LDL R0, [R1] ;"), 0);
}
