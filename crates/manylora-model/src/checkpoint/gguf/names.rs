//! GGUF tensor names to Hugging Face's, which all of this crate speaks.

/// The Hugging Face name of a GGUF tensor of the Llama and Qwen families; None for a name they do not have.
pub(super) fn hugging_face(name: &str) -> Option<String> {
    match name {
        "token_embd.weight" => return Some("model.embed_tokens.weight".to_owned()),
        "output_norm.weight" => return Some("model.norm.weight".to_owned()),
        "output.weight" => return Some("lm_head.weight".to_owned()),
        _ => {}
    }
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let number: usize = layer.parse().ok()?;
    // `blk.007.` or `blk.+7.` would be a second spelling of layer 7.
    if number.to_string() != layer {
        return None;
    }
    let (module, part) = rest.split_once('.')?;
    let module = match module {
        "attn_norm" => "input_layernorm",
        "ffn_norm" => "post_attention_layernorm",
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_output" => "self_attn.o_proj",
        "attn_q_norm" => "self_attn.q_norm",
        "attn_k_norm" => "self_attn.k_norm",
        "ffn_gate" => "mlp.gate_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        _ => return None,
    };
    matches!(part, "weight" | "bias").then(|| format!("model.layers.{number}.{module}.{part}"))
}
