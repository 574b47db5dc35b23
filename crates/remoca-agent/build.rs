//! Compiles the eBPF object with clang, and links a binary without shared libraries: a guest may have an older libc than
//! the build machine, and has no libelf. If static libraries are missing, the shared ones are linked, and cargo warns.

use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    let out_directory = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    compile_capture_program(&out_directory);
    link_statically(&out_directory);
}

fn compile_capture_program(out_directory: &Path) {
    println!("cargo:rerun-if-changed=bpf");
    println!("cargo:rerun-if-changed=build");
    println!("cargo:rerun-if-env-changed=CLANG");
    let clang = env::var("CLANG").unwrap_or_else(|_| "clang".to_owned());
    let libbpf_headers = env::var("DEP_BPF_INCLUDE").expect("libbpf-sys hands out its headers");
    let status = Command::new(&clang)
        // -mcpu=v3: clang 14's default (v2) has no atomic operations that return the old value.
        .args(["-target", "bpf", "-mcpu=v3", "-O2", "-g", "-Wall", "-Werror"])
        .args(["-Ibpf", "-I", &libbpf_headers])
        .args(["-c", "bpf/capture.bpf.c", "-o"])
        .arg(out_directory.join("capture.bpf.o"))
        .status();
    match status {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("{clang} could not compile bpf/capture.bpf.c: {status}"),
        Err(error) => panic!("{clang}: {error}; install clang (14 or later), or name it in the variable CLANG"),
    }
}

/// Links the static libraries. The linker takes the first directory that has a library under either name, and ours
/// have only archives.
fn link_statically(out_directory: &Path) {
    if env::var_os("HOST") != env::var_os("TARGET") {
        // This machine's archives suit only this machine as the target.
        return;
    }
    let mut wanted = vec![("elf", "elf"), ("z", "z")];
    // Newer versions of libelf need these two libraries, after libelf on the command line. Older ones ignore them.
    cc::Build::new().file("build/eu_search.c").cargo_metadata(false).compile("eu_search");
    let mut after_libelf = vec!["-leu_search"];
    if find_archive("zstd").is_some() {
        wanted.push(("zstd", "zstd"));
        after_libelf.insert(0, "-lzstd");
    }
    let Some(directory) = collect_archives(out_directory.join("archives"), &wanted) else {
        println!("cargo:warning=no static {wanted:?}: remoca-agent will need the shared ones in the guest");
        return;
    };
    println!("cargo:rustc-link-search=native={}", directory.display());
    println!("cargo:rustc-link-search=native={}", out_directory.display());

    let features = env::var("CARGO_CFG_TARGET_FEATURE").unwrap_or_default();
    if features.split(',').any(|name| name == "crt-static") {
        // rustc links a static libc by itself. It is named again for the libraries after it.
        pass_to_linker("link-arg", &["-Wl,-Bstatic"]);
        pass_to_linker("link-arg", &after_libelf);
        return pass_to_linker("link-arg", &["-lc"]);
    }
    pass_to_linker("link-arg", &after_libelf);
    // Only for the binary: test programs remain dynamically linked.
    let libc = [("c", "c"), ("m", "m"), ("rt", "rt"), ("pthread", "pthread"), ("util", "util"), ("dl", "dl")];
    let wanted = [libc.as_slice(), &[("gcc_eh", "gcc_s")]].concat();
    let Some(directory) = collect_archives(out_directory.join("libc-archives"), &wanted) else {
        println!("cargo:warning=no static libc: remoca-agent will need one at least as new in the guest");
        return;
    };
    pass_to_linker("link-arg-bins", &[&format!("-L{}", directory.display()), "-static-pie", "-lc"]);
}

fn pass_to_linker(instruction: &str, arguments: &[&str]) {
    for argument in arguments {
        println!("cargo:rustc-{instruction}={argument}");
    }
}

/// Makes a directory of links to the archives. Each pair is the archive's name and the name it is linked under.
/// Returns `None` if an archive is missing.
fn collect_archives(directory: PathBuf, wanted: &[(&str, &str)]) -> Option<PathBuf> {
    fs::remove_dir_all(&directory).ok();
    fs::create_dir_all(&directory).expect("OUT_DIR is writable");
    for (name, link_name) in wanted {
        symlink(find_archive(name)?, directory.join(format!("lib{link_name}.a"))).expect("OUT_DIR is writable");
    }
    Some(directory)
}

fn find_archive(name: &str) -> Option<PathBuf> {
    let compiler = env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let output = Command::new(compiler).arg(format!("-print-file-name=lib{name}.a")).output().ok()?;
    let path = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim());
    // The compiler prints a library that it does not find without a directory.
    path.is_absolute().then_some(path)
}
