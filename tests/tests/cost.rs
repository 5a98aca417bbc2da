//! The cost model of a plan against the tensors of its file.

use loaf_bake::build::BuildOptions;
use loaf_bake::weights::QuantOptions;
use loaf_formats::cost::graph;
use loaf_formats::experts::stored_planes;
use loaf_formats::plan::Phase;
use loaf_tests::{Baked, bake, container};
use serde_json::Value;

/// Bytes of weights that one token reads, from the names and lengths of the file's tensors: all of
/// every tensor, but of a table of embeddings one row, and of experts those that a token chooses.
fn bytes_of_a_token(baked: &Baked, config: &Value) -> u64 {
    let number = |key: &str| config[key].as_u64().or(config["text_config"][key].as_u64()).unwrap();
    let tensors = stored_planes(&container(&baked.loaf)).unwrap();
    let names: Vec<&str> = tensors.iter().map(|t| t.name.as_str()).collect();
    let tied = !names.iter().any(|name| name.starts_with("lm_head."));
    let bytes = |name: &str, len: u64| match name {
        _ if name.starts_with("model.embed_tokens.") => len / number("vocab_size") + if tied { len } else { 0 },
        _ if name.contains(".switch_mlp.") => len / number("num_experts") * number("num_experts_per_tok"),
        _ => len,
    };
    tensors.iter().map(|t| bytes(&t.name, t.piece * t.pieces.0)).sum()
}

#[test]
fn the_weights_of_a_decode_graph_are_the_bytes_it_touches() {
    for name in ["hf/qwen3", "hf/qwen3_moe", "hf/qwen3_next", "hf/qwen3_5_moe"] {
        let config = std::fs::read(loaf_tests::fixture(name).join("config.json")).unwrap();
        let config: Value = serde_json::from_slice(&config).unwrap();
        for bits in [None, Some(4)] {
            let quant = QuantOptions { bits, group: 32, ..QuantOptions::default() };
            let baked = bake(name, &BuildOptions { quant, ..BuildOptions::default() });
            let plan = baked.loaf.plan();
            let template = plan.templates_of(Phase::Decode).next().unwrap();
            let expected = bytes_of_a_token(&baked, &config);
            for p in [0, 5] {
                assert_eq!(graph(template, p, 1).weights, expected, "{name} {bits:?} at {p}");
            }
        }
    }
}
