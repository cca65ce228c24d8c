//! [`inspect`]: configuration and tensor header of a folder, without reading a tensor; and the way on from there.

use std::fs::File;
use std::io::{self, Cursor, Read, Seek, SeekFrom};
use std::path::Path;
use std::time::SystemTime;

use manylora_kernels::{KernelError, SiteShape};

use super::base_name::{self, BaseMatch};
use super::config::AdapterConfig;
use super::factors::TensorBytes;
use super::fault::Fault;
use super::folder::Folder;
use super::matching::{Matched, match_tensors, note_tensors};
use super::policy::AdapterPolicy;
use super::prepared::{PreparedAdapter, must_tie, prepare, prepare_into};
use super::report::LoadReport;
use super::scaling::Scaling;
use super::tensor_file::{TensorEntry, read_header};
use super::tokenizer_ids;
use crate::error::{AdapterRefusal, ModelError};
use crate::runner::{AdapterPacker, PackedHandle};

const CONFIG: &str = "adapter_config.json";
const TENSORS: &str = "adapter_model.safetensors";

/// Largest configuration that is read.
const MAX_CONFIG_BYTES: u64 = 4 << 20;

/// An adapter whose configuration and tensor header were found to be right. It holds the tensor file open, so that what is
/// read is what was inspected.
#[derive(Debug)]
pub struct AdapterHeader {
    policy: AdapterPolicy,
    checked: Checked,
    sites: Vec<SiteShape>,
    report: LoadReport,
}

/// An adapter that was read, checked and packed in one pass.
#[derive(Clone, Debug)]
pub struct LoadedContent {
    /// Content digest: the adapter version's identity.
    pub digest: [u8; 32],
    /// What is applied and what is not.
    pub report: LoadReport,
    /// The packed factors.
    pub packed: PackedHandle,
}

/// Looks at an adapter's configuration and tensor header, and at no tensor. Everything that can be known without the
/// values is checked.
pub fn inspect(name: &str, path: &Path, policy: &AdapterPolicy) -> Result<AdapterHeader, AdapterRefusal> {
    let mut report = LoadReport::new(name, &path.display().to_string());
    match check(path, policy, &mut report) {
        Ok(checked) => {
            let sites = checked.matched.sites.iter().map(|site| site.shape).collect();
            Ok(AdapterHeader { policy: policy.clone(), checked, sites, report })
        }
        Err(fault) => Err(fault.into_refusal(report)),
    }
}

impl AdapterHeader {
    /// Adapted sites, sorted by index: what a backend needs to say how many bytes it will take.
    pub fn sites(&self) -> &[SiteShape] {
        &self.sites
    }

    /// What is known without the tensors.
    pub fn report(&self) -> &LoadReport {
        &self.report
    }

    /// Ranks and scales by module.
    pub fn scaling(&self) -> &Scaling {
        &self.checked.config.scaling
    }

    /// What a user should look at.
    pub fn warnings(&self) -> &[String] {
        &self.report.warnings
    }

    /// Reads and checks all values.
    pub fn read(self) -> Result<PreparedAdapter, AdapterRefusal> {
        let Self { policy, checked, mut report, .. } = self;
        let Checked { config, matched, tensors, file, stamp } = checked;
        let mut bytes = FileBytes(file);
        let parts = prepare(&config, &matched, &tensors, &mut bytes, &policy, &mut report);
        match parts.and_then(|parts| stamp.check(&bytes.0).map(|()| parts)) {
            Ok(parts) => Ok(parts.into_adapter(report)),
            Err(fault) => Err(fault.into_refusal(report)),
        }
    }

    /// Reads, checks and packs all values in one pass; what was read is packed while it is in the cache, and no more of the
    /// file than that is held.
    ///
    /// # Errors
    /// A refusal as [`ModelError::Adapter`], or what the packer says.
    pub fn load(self, packer: &dyn AdapterPacker) -> Result<LoadedContent, ModelError> {
        self.load_knowing(packer, None)
    }

    /// As [`Self::load`], of content that was loaded before with the report `known`: if its digest is the same, so are its
    /// values, which are not looked at one by one again.
    ///
    /// # Errors
    /// As [`Self::load`]; [`ModelError::OtherContent`] if the digest is another.
    pub fn load_again(self, packer: &dyn AdapterPacker, known: &LoadReport) -> Result<LoadedContent, ModelError> {
        let content = self.load_knowing(packer, Some(known))?;
        // Values of anything but that content were not looked at.
        let same = known.version.is_some() && known.version == content.report.version;
        if same { Ok(content) } else { Err(ModelError::OtherContent { found: content.digest }) }
    }

    fn load_knowing(self, packer: &dyn AdapterPacker, known: Option<&LoadReport>) -> Result<LoadedContent, ModelError> {
        if must_tie(&self.checked.config, &self.policy) {
            let adapter = self.read()?;
            let packed = packer.pack(&adapter)?;
            return Ok(LoadedContent { digest: adapter.digest, report: adapter.report, packed });
        }
        let Self { policy, checked, sites, mut report } = self;
        let Checked { matched, tensors, file, stamp, .. } = checked;
        let mut bytes = FileBytes(file);
        let make_room = || packer.lend_core();
        let mut outcome = None;
        let packed = packer.pack_stored(&sites, &mut |sink| {
            let result = prepare_into(sink, &matched, &tensors, &mut bytes, &policy, (known, &make_room), &mut report);
            let result = result.and_then(|digest| stamp.check(&bytes.0).map(|()| digest));
            let refused = result.is_err();
            outcome = Some(result);
            if refused { Err(KernelError::Source("the adapter was refused".to_owned())) } else { Ok(()) }
        });
        match outcome {
            Some(Err(fault)) => Err(fault.into_refusal(report).into()),
            Some(Ok(digest)) => Ok(LoadedContent { digest, report, packed: packed? }),
            None => match packed {
                Err(error) => Err(error),
                Ok(_) => Err(KernelError::Source("an adapter was packed without its factors".to_owned()).into()),
            },
        }
    }
}

impl PreparedAdapter {
    /// An adapter from the bytes of its `adapter_config.json` and `adapter_model.safetensors`, checked as one from a
    /// folder is.
    pub fn from_bytes(
        name: &str,
        config: &[u8],
        tensors: &[u8],
        policy: &AdapterPolicy,
    ) -> Result<Self, AdapterRefusal> {
        let mut report = LoadReport::new(name, "");
        let mut build = || {
            let config = AdapterConfig::parse(config, policy.max_rank)?;
            config.describe(&mut report);
            check_base_name(&config, policy, &mut report)?;
            let mut file = Cursor::new(tensors);
            let tensors = read_header(&mut file, tensors.len() as u64, TENSORS)?;
            let matched = match_tensors(&config, &tensors, policy, &mut report)?;
            prepare(&config, &matched, &tensors, &mut FileBytes(file), policy, &mut report)
        };
        match build() {
            Ok(parts) => Ok(parts.into_adapter(report)),
            Err(fault) => Err(fault.into_refusal(report)),
        }
    }
}

#[derive(Debug)]
struct Checked {
    config: AdapterConfig,
    matched: Matched,
    tensors: Vec<TensorEntry>,
    file: File,
    stamp: FileStamp,
}

/// Length and time of change of an open file.
#[derive(Debug, PartialEq, Eq)]
struct FileStamp {
    length: u64,
    modified: Option<SystemTime>,
}

impl FileStamp {
    fn take(file: &File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        Ok(Self { length: metadata.len(), modified: metadata.modified().ok() })
    }

    /// Refuses a file that was written to while it was read: its values may be half old and half new.
    fn check(&self, file: &File) -> Result<(), Fault> {
        match Self::take(file) {
            Ok(now) if now == *self => Ok(()),
            _ => Err(Fault::invalid(format!(
                "`{TENSORS}` was changed while it was read; load it again once it is written, and put new files in place \
                 by renaming them"
            ))
            .key(TENSORS)),
        }
    }
}

fn check(path: &Path, policy: &AdapterPolicy, report: &mut LoadReport) -> Result<Checked, Fault> {
    let folder = Folder::find(path, policy.allowed_roots.as_deref())?;
    let Some(text) = folder.read(CONFIG, MAX_CONFIG_BYTES)? else {
        let hint = if folder.has("config.json") { ": this is a whole model, not an adapter" } else { "" };
        return Err(Fault::not_found(format!("No adapter found for `{}`: it has no `{CONFIG}`{hint}", path.display())));
    };
    let (config, objections) = AdapterConfig::parse_with_fault(&text, policy.max_rank)?;
    let refused = objections.map_or_else(
        || {
            config.describe(report);
            check_base_name(&config, policy, report)
        },
        Err,
    );
    if let Err(fault) = refused {
        note_what_else(&folder, &config, policy, report);
        return Err(fault);
    }
    let Some(mut tensors_file) = folder.open(TENSORS)? else {
        return Err(weights_missing(&folder, path));
    };
    let stamp = FileStamp::take(&tensors_file.file).map_err(|error| Fault::io(&path.join(TENSORS), &error))?;
    let tensors = read_header(&mut tensors_file.file, stamp.length, TENSORS)?;
    let matched = match_tensors(&config, &tensors, policy, report)?;
    tokenizer_ids::check(&folder, policy, report)?;
    Ok(Checked { config, matched, tensors, file: tensors_file.file, stamp })
}

/// Writes to the report of an adapter that is refused already what its tensors are, if they can be looked at.
fn note_what_else(folder: &Folder, config: &AdapterConfig, policy: &AdapterPolicy, report: &mut LoadReport) {
    let Ok(Some(mut opened)) = folder.open(TENSORS) else { return };
    let Ok(metadata) = opened.file.metadata() else { return };
    if let Ok(tensors) = read_header(&mut opened.file, metadata.len(), TENSORS) {
        note_tensors(config, &tensors, policy, report);
    }
}

fn weights_missing(folder: &Folder, path: &Path) -> Fault {
    let path = path.display();
    if let Some(pickle) = ["adapter_model.bin", "adapter_model.pt"].into_iter().find(|name| folder.has(name)) {
        return Fault::invalid(format!(
            "`{path}` has its weights in `{pickle}` only; pickles can run code and are never opened: save it again with \
             PEFT (safe_serialization=True) to get `{TENSORS}`"
        ))
        .key(pickle);
    }
    if folder.has("adapter_model.safetensors.index.json") {
        return Fault::invalid(format!("`{path}` is split into several files; save it again as one `{TENSORS}`"));
    }
    Fault::invalid(format!("weights missing: `{path}` doesn't contain tensors (`{TENSORS}`)")).key(TENSORS)
}

impl AdapterConfig {
    /// Writes what the configuration says to the report.
    pub(super) fn describe(&self, report: &mut LoadReport) {
        report.base_model.clone_from(&self.base_model);
        report.warnings.extend(self.warnings.iter().cloned());
    }
}

/// Compares the base that the adapter names with this one.
pub(super) fn check_base_name(
    config: &AdapterConfig,
    policy: &AdapterPolicy,
    report: &mut LoadReport,
) -> Result<(), Fault> {
    let Some(named) = &config.base_model else {
        return Ok(());
    };
    let ours = policy.base_names.first().map_or("unnamed", String::as_str);
    match base_name::compare(named, &policy.base_names) {
        BaseMatch::Same => {}
        BaseMatch::SameButForFormat => {
            report.warnings.push(format!(
                "it was trained on `{named}`, which is `{ours}` in another number format; results may differ slightly"
            ));
        }
        BaseMatch::Other if policy.strict_base => {
            return Err(Fault::invalid(format!(
                "it was trained on `{named}` and this base is `{ours}` (strict_base is on)"
            ))
            .key("base_model_name_or_path"));
        }
        BaseMatch::Other => {
            report.warnings.push(format!("it was trained on `{named}` and this base is `{ours}`"));
        }
    }
    Ok(())
}

struct FileBytes<F>(F);

impl<F: Read + Seek> FileBytes<F> {
    fn fill(&mut self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.seek(SeekFrom::Start(offset))?;
        self.0.read_exact(out)
    }
}

impl<F: Read + Seek> TensorBytes for FileBytes<F> {
    fn read(&mut self, tensor: &TensorEntry, first: u64, out: &mut [u8]) -> Result<(), Fault> {
        self.fill(tensor.offset + first, out)
            .map_err(|error| Fault::invalid(format!("`{}` could not be read: {error}", tensor.name)).key(&tensor.name))
    }

    fn read_all(&mut self, tensors: &[&TensorEntry], out: &mut [u8]) -> Result<(), Fault> {
        let mut rest = out;
        for run in tensors.chunk_by(|one, next| one.offset + one.bytes as u64 == next.offset) {
            let (content, after) = rest.split_at_mut(run.iter().map(|tensor| tensor.bytes).sum());
            if self.fill(run[0].offset, content).is_err() {
                // One by one, to name the tensor that cannot be read.
                let mut content = content;
                for tensor in run {
                    let (one, others) = content.split_at_mut(tensor.bytes);
                    self.read(tensor, 0, one)?;
                    content = others;
                }
            }
            rest = after;
        }
        Ok(())
    }
}
