//! Sites: the places of a decoder that an adapter can touch.
//!
//! A site is one linear map (or the embedding) of one layer. Its dense index is what a packed adapter's table is
//! indexed by, so that the hot path never compares names.

/// The modules of a decoder layer, and the two ends of the model, that adapters can touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Module {
    /// `self_attn.q_proj`
    Q,
    /// `self_attn.k_proj`
    K,
    /// `self_attn.v_proj`
    V,
    /// `self_attn.o_proj`
    O,
    /// `mlp.gate_proj`
    Gate,
    /// `mlp.up_proj`
    Up,
    /// `mlp.down_proj`
    Down,
    /// `input_layernorm` (no adapter format that is loaded today touches it)
    InputNorm,
    /// `post_attention_layernorm` (as above)
    PostNorm,
}

impl Module {
    /// How many sites a layer has.
    pub const COUNT: u32 = 9;
    /// The linear modules of a layer, in the order of their sites.
    pub const LINEAR: [Self; 7] = [Self::Q, Self::K, Self::V, Self::O, Self::Gate, Self::Up, Self::Down];
}

/// Dense index of a place in the model: 0 = embedding, 1 = lm_head, 2 = final norm, then the modules layer by layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Site(pub u32);

impl Site {
    /// The input embedding (`model.embed_tokens`).
    pub const EMBED: Self = Self(0);
    /// The output projection (`lm_head`).
    pub const HEAD: Self = Self(1);
    /// The norm before the output projection (`model.norm`).
    pub const FINAL_NORM: Self = Self(2);

    /// The site of `module` in `layer`.
    pub const fn layer(layer: u32, module: Module) -> Self {
        Self(3 + layer * Module::COUNT + module as u32)
    }

    /// Number of sites of a model with `layers` layers.
    pub const fn count(layers: u32) -> usize {
        (3 + layers * Module::COUNT) as usize
    }

    /// The index as usize.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Shape of one adapted site: `A` is `[rank, input]`, `B` is `[output, rank]`.
///
/// For [`Site::EMBED`] `input` is the vocabulary (A is gathered by token id, not multiplied).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SiteShape {
    /// Where it applies.
    pub site: Site,
    /// Rank of the factorization.
    pub rank: u32,
    /// Columns of A.
    pub input: u32,
    /// Rows of B.
    pub output: u32,
    /// alpha/r or alpha/sqrt(r): multiplied into the shrink result as f32, never into the stored factors.
    pub scale: f32,
}
