//! Compiles the CUDA kernels into one image that the library embeds, where feature `cuda` asks for them.
//!
//! The kernels' own Makefile knows the flags. Without nvcc the library is built without kernels, and says so when it is
//! asked for a card; `MANYLORA_REQUIRE_CUDA=1` makes that an error. nvcc is looked for in `NVCC`, on `PATH`, in
//! `CUDA_HOME` and in the Python environment (the package `nvidia-cuda-nvcc`). `MANYLORA_CUDA_ARCHS` (`80 90`) chooses the
//! cards to build for; builds that name one folder in `MANYLORA_CUDA_IMAGES` share what they compile.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

const VARIABLES: [&str; 7] = [
    "CUDA_HOME",
    "MANYLORA_CUDA_ARCHS",
    "MANYLORA_CUDA_IMAGES",
    "MANYLORA_REQUIRE_CUDA",
    "NVCC",
    "PATH",
    "VIRTUAL_ENV",
];

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return ExitCode::SUCCESS;
    }
    for variable in VARIABLES {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    match embed() {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            println!("cargo::error={reason}");
            ExitCode::FAILURE
        }
    }
}

/// Writes `kernels.rs`, with the images where they could be made.
fn embed() -> Result<(), String> {
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo did not say where to build")?);
    let manifest = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").ok_or("cargo did not say where the sources are")?);
    let sources = manifest.join("../../kernels");
    let required = env::var("MANYLORA_REQUIRE_CUDA").is_ok_and(|value| value == "1");
    let why = if !sources.join("Makefile").is_file() {
        "the kernels' sources were not there when it was built"
    } else if let Some(nvcc) = find_nvcc(&manifest) {
        println!("cargo::rerun-if-changed={}", sources.display());
        return write(&out, &compile(&sources, &nvcc, &out, required)?, "");
    } else {
        "nvcc was not found when it was built"
    };
    if required {
        return Err(format!("MANYLORA_REQUIRE_CUDA=1, and {why}: install the package nvidia-cuda-nvcc, or set NVCC"));
    }
    write(&out, &Built::default(), why)
}

#[derive(Default)]
struct Built {
    toolkit: Option<(u32, u32)>,
    architectures: String,
    images: Vec<PathBuf>,
}

fn compile(sources: &Path, nvcc: &Path, out: &Path, required: bool) -> Result<Built, String> {
    let toolkit = toolkit_version(nvcc)?;
    // A release is built for every card, which the Makefile lists; while developing, the oldest one is enough: its code
    // in PTX runs on all.
    let chosen = env::var("MANYLORA_CUDA_ARCHS").ok().filter(|list| !list.trim().is_empty());
    let architectures = if required { chosen } else { Some(chosen.unwrap_or_else(|| "80".to_owned())) };
    let shared = env::var_os("MANYLORA_CUDA_IMAGES").filter(|value| !value.is_empty()).map(PathBuf::from);
    let folder = shared.unwrap_or_else(|| out.join("cuda"));
    fs::create_dir_all(&folder).map_err(|error| format!("`{}`: {error}", folder.display()))?;
    let mut make = Command::new("make");
    make.arg("-C").arg(sources).arg("fatbin").arg(assignment("OUT", &folder)).arg(assignment("NVCC", nvcc));
    make.arg(format!("-j{}", env::var("NUM_JOBS").unwrap_or_else(|_| "1".to_owned())));
    if let Some(architectures) = architectures {
        make.arg(format!("ARCHS={architectures}"));
    }
    // Cargo's own job server is not inherited.
    make.env_remove("MAKEFLAGS").env_remove("MFLAGS");
    run(&mut make)?;
    let built = fs::read_dir(&folder).map_err(|error| format!("`{}`: {error}", folder.display()))?;
    let mut images: Vec<PathBuf> = built
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "fatbin"))
        // Not those of sources that are gone.
        .filter(|path| path.file_stem().is_some_and(|stem| sources.join(stem).with_extension("cu").is_file()))
        .collect();
    images.sort();
    if images.is_empty() {
        return Err("`make fatbin` made no fatbin".to_owned());
    }
    // Images that others share may be made anew by them, or be gone.
    println!("cargo::rerun-if-changed={}", folder.join("compiled-by.txt").display());
    let list = folder.join("architectures.txt");
    let text = fs::read_to_string(&list).map_err(|error| format!("`{}`: {error}", list.display()))?;
    let architectures = text.split_whitespace().collect::<Vec<_>>().join(" ");
    Ok(Built { toolkit: Some(toolkit), architectures, images })
}

fn write(out: &Path, built: &Built, missing: &str) -> Result<(), String> {
    let mut images = String::new();
    for image in &built.images {
        let name = image.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        // Writing to a string cannot fail.
        let _ = write!(images, "({name:?}, include_bytes!({:?})), ", image.display().to_string());
    }
    let text = format!(
        "pub(super) const TOOLKIT: Option<(u32, u32)> = {:?};\n\
         const ARCHITECTURES: &str = {:?};\n\
         const MISSING: &str = {missing:?};\n\
         const IMAGES: &[(&str, &[u8])] = &[{images}];\n",
        built.toolkit, built.architectures
    );
    let path = out.join("kernels.rs");
    fs::write(&path, text).map_err(|error| format!("`{}`: {error}", path.display()))
}

fn find_nvcc(manifest: &Path) -> Option<PathBuf> {
    // A variable that names no file is as good as an answer: the build must not take another one silently.
    if let Some(named) = env::var_os("NVCC").filter(|value| !value.is_empty()) {
        return Some(PathBuf::from(named));
    }
    let on_path = env::var_os("PATH").map(|path| env::split_paths(&path).collect::<Vec<_>>()).unwrap_or_default();
    let home = env::var_os("CUDA_HOME").map(|home| PathBuf::from(home).join("bin"));
    let environments = [env::var_os("VIRTUAL_ENV").map(PathBuf::from), Some(manifest.join("../../.venv"))];
    let packages = environments.into_iter().flatten().flat_map(|environment| {
        let libraries = fs::read_dir(environment.join("lib")).into_iter().flatten().flatten();
        let vendors = libraries.filter_map(|library| fs::read_dir(library.path().join("site-packages/nvidia")).ok());
        vendors.flatten().flatten().map(|vendor| vendor.path().join("bin")).collect::<Vec<_>>()
    });
    on_path.into_iter().chain(home).chain(packages).map(|folder| folder.join("nvcc")).find(|path| path.is_file())
}

/// From `Cuda compilation tools, release 13.0, V13.0.88`.
fn toolkit_version(nvcc: &Path) -> Result<(u32, u32), String> {
    let text = run(Command::new(nvcc).arg("--version"))?;
    let parse = || {
        let release = text.split("release ").nth(1)?.split([',', ' ', '\n']).next()?;
        let (major, minor) = release.split_once('.')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    };
    let said = text.lines().next().unwrap_or_default();
    parse().ok_or_else(|| format!("`{} --version` says no release: {said}", nvcc.display()))
}

fn assignment(name: &str, path: &Path) -> std::ffi::OsString {
    let mut text = std::ffi::OsString::from(format!("{name}="));
    text.push(path);
    text
}

/// Standard output, or the error that says what failed.
fn run(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|error| format!("{command:?} could not be started: {error}"))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        // One line, as cargo takes it.
        let tail: Vec<&str> = text.lines().rev().take(5).collect();
        let tail = tail.into_iter().rev().collect::<Vec<_>>().join(" | ");
        return Err(format!("{command:?} failed ({}): {tail}", output.status));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
