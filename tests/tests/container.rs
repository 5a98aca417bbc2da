//! The container as others meet it: files written by the writer, read by our reader, by the
//! safetensors crate and by a naive second implementation of the hash tree, and files that someone
//! has tampered with.

use loaf_formats::container::{
    Container, Error, FLAG_OPTIONAL, FileLayout, HEAD_BYTES, LEAF_BYTES, Layout, SectionKind, WeightIx, Writer, hex,
};
use loaf_formats::dtype::DType;
use proptest::prelude::*;
use sha2::{Digest as _, Sha256};
use std::fs;
use std::path::Path;

/// Byte `i` of weight `w`: never zero, so that a missing write cannot look like padding.
fn byte(w: usize, i: u64) -> u8 {
    (i.wrapping_mul(31).wrapping_add(w as u64 * 7) % 255) as u8 + 1
}

fn content(w: usize, len: u64) -> Vec<u8> {
    (0..len).map(|i| byte(w, i)).collect()
}

/// Weights of many sizes, a contiguous group and one that cannot be contiguous.
fn rich_layout() -> (Layout, Vec<WeightIx>) {
    let mut layout = Layout::new();
    let weights: [(&str, DType, &[u64]); 9] = [
        ("model.norm.weight", DType::BF16, &[33]),
        ("model.q.weight", DType::U32, &[256, 128]),
        ("model.big", DType::F32, &[1100, 2400]), // 10 MiB: several leaves
        ("model.k.weight", DType::U32, &[64, 128]),
        ("model.v.weight", DType::U32, &[64, 128]),
        ("model.q.scales", DType::F16, &[5]),
        ("model.k.scales", DType::F16, &[7]),
        ("scalar", DType::F32, &[]),
        ("model.embed \"quoted\" é", DType::U8, &[65536]),
    ];
    let ix: Vec<WeightIx> = weights.iter().map(|(n, d, s)| layout.weight(n, *d, s).unwrap()).collect();
    layout.group(&[ix[1], ix[3], ix[4]]).unwrap();
    layout.group(&[ix[5], ix[6]]).unwrap();
    (layout, ix)
}

const SECTIONS: [(SectionKind, &[u8]); 6] = [
    (SectionKind::Plan, b"the plan"),
    (SectionKind::Manifest, b"{\"family\":\"test\"}"),
    (SectionKind::Tokenizer, &[9; 1000]),
    (SectionKind::Chat, b""),
    (SectionKind::Golden, b"golden"),
    (SectionKind::TokenizerSource, b"source"),
];

fn create(path: &Path, layout: Layout) -> Writer {
    let lengths: Vec<(SectionKind, u64)> = SECTIONS.iter().map(|(k, b)| (*k, b.len() as u64)).collect();
    let layout = FileLayout::new(layout.finish().unwrap(), &lengths).unwrap();
    Writer::create(path, layout).unwrap()
}

fn write_rich(path: &Path) -> String {
    let (layout, ix) = rich_layout();
    let writer = create(path, layout);
    for (w, ix) in ix.iter().enumerate() {
        writer.write_at(*ix, 0, &content(w, writer.layout().weights()[*ix].len)).unwrap();
    }
    for (kind, bytes) in SECTIONS {
        writer.write_section(kind, bytes).unwrap();
    }
    writer.finish().unwrap().to_string()
}

/// A valid loaf of about 50 KiB, for tests that open it many thousand times.
fn small_loaf() -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("small.loaf");
    let mut layout = Layout::new();
    let ix = [("model.layers.0.mlp.weight", 100), ("model.norm", 64), ("lm_head", 300)]
        .map(|(n, len)| layout.weight(n, DType::U8, &[len]).unwrap());
    let writer = create(&path, layout);
    for (w, ix) in ix.iter().enumerate() {
        writer.write_at(*ix, 0, &content(w, writer.layout().weights()[*ix].len)).unwrap();
    }
    for (kind, bytes) in SECTIONS {
        writer.write_section(kind, bytes).unwrap();
    }
    writer.finish().unwrap();
    fs::read(path).unwrap()
}

fn verify(bytes: &[u8]) -> Result<String, Error> {
    let loaf = Container::open(bytes)?;
    loaf.verify_all(&mut |_| {})?;
    Ok(loaf.artifact_id().to_string())
}

fn data_start(bytes: &[u8]) -> usize {
    (u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize).saturating_add(8)
}

/// Makes the hashes of header and head fit again, as one does who tampers knowingly.
fn reseal(bytes: &mut [u8]) {
    let start = data_start(bytes);
    let header = Sha256::digest(&bytes[..start]);
    bytes[start + 64..start + 96].copy_from_slice(&header);
    let id_at = start + HEAD_BYTES as usize - 32;
    let id = Sha256::digest(&bytes[start..id_at]);
    bytes[id_at..id_at + 32].copy_from_slice(&id);
}

fn names_in(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn what_is_written_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rich.loaf");
    let id = write_rich(&path);
    assert_eq!(names_in(folder.path()), ["rich.loaf"]);
    let bytes = fs::read(&path).unwrap();
    let loaf = Container::open(&bytes).unwrap();
    assert_eq!(loaf.artifact_id().to_string(), id);
    let mut told = 0;
    loaf.verify_all(&mut |n| told += n).unwrap();
    assert_eq!(told, loaf.section_bytes_total());
    for (kind, expected) in SECTIONS {
        assert_eq!(loaf.section(kind), Some(expected), "{kind}");
        assert_eq!(loaf.verify_section(kind).unwrap(), expected);
    }
    assert_eq!(loaf.section(SectionKind::Graphs), None);
    let plan = loaf.leaves(SectionKind::Plan).unwrap();
    assert_eq!((plan.count(), plan.check(0).unwrap()), (1, 8));
    assert!(matches!(plan.check(1), Err(Error::Range { .. })));
    assert!(matches!(loaf.leaves(SectionKind::HashTree), Err(Error::MissingSection { .. })));
    let (layout, _) = rich_layout();
    let placed = layout.finish().unwrap();
    let tensors = loaf.tensors().unwrap();
    for (w, weight) in placed.weights().iter().enumerate() {
        let t = tensors.iter().find(|t| t.name == weight.name).unwrap();
        assert_eq!((t.dtype, &t.shape, t.offset, t.len), (weight.dtype, &weight.shape, weight.offset, weight.len));
        assert!(loaf.data()[t.offset as usize..][..t.len as usize] == content(w, t.len), "{}", t.name);
    }
    assert_eq!(loaf.weights().len() as u64, placed.span().end - placed.span().start);
}

#[test]
fn the_safetensors_crate_finds_the_weights_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rich.loaf");
    write_rich(&path);
    let bytes = fs::read(&path).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let (layout, _) = rich_layout();
    for (w, weight) in layout.finish().unwrap().weights().iter().enumerate() {
        let view = tensors.tensor(&weight.name).unwrap();
        assert!(view.data() == content(w, weight.len), "{}", weight.name);
        let shape: Vec<u64> = view.shape().iter().map(|n| *n as u64).collect();
        assert_eq!(shape, weight.shape);
        assert_eq!(format!("{:?}", view.dtype()), weight.dtype.safetensors_name());
    }
    assert_eq!(tensors.tensor("loaf.plan").unwrap().data(), b"the plan");
}

#[test]
fn order_and_threads_leave_no_trace_in_the_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let (one, many) = (folder.path().join("one.loaf"), folder.path().join("many.loaf"));
    let id = write_rich(&one);

    let (layout, ix) = rich_layout();
    let writer = create(&many, layout);
    for (kind, bytes) in SECTIONS.iter().rev() {
        writer.write_section(*kind, bytes).unwrap();
    }
    std::thread::scope(|scope| {
        for thread in 0..3u64 {
            let (writer, ix) = (&writer, &ix);
            scope.spawn(move || {
                for (w, ix) in ix.iter().enumerate().rev() {
                    let bytes = content(w, writer.layout().weights()[*ix].len);
                    for (i, part) in bytes.chunks(1000).enumerate() {
                        if i as u64 % 3 == thread {
                            writer.write_at(*ix, i as u64 * 1000, part).unwrap();
                        }
                    }
                }
            });
        }
    });
    let sealed = writer.seal().unwrap();
    let mut leaves: Vec<(u64, [u8; 32])> = std::thread::scope(|scope| {
        let hash = |odd: u64| {
            let sealed = &sealed;
            move || -> Vec<(u64, [u8; 32])> {
                let mut buffer = Vec::new();
                let mine = (0..sealed.leaf_count()).filter(|ix| ix % 2 == odd);
                mine.map(|ix| (ix, sealed.hash_leaf(ix, &mut buffer).unwrap())).collect()
            }
        };
        let threads = [scope.spawn(hash(0)), scope.spawn(hash(1))];
        threads.into_iter().flat_map(|t| t.join().unwrap()).collect()
    });
    leaves.sort();
    let leaves: Vec<[u8; 32]> = leaves.into_iter().map(|(_, leaf)| leaf).collect();
    assert_eq!(sealed.finish(&leaves).unwrap().to_string(), id);
    assert!(fs::read(one).unwrap() == fs::read(many).unwrap());
}

#[test]
fn weights_keep_their_alignment_in_the_file_and_groups_are_one_span() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rich.loaf");
    write_rich(&path);
    let bytes = fs::read(&path).unwrap();
    let start = data_start(&bytes) as u64;
    let (layout, ix) = rich_layout();
    let placed = layout.finish().unwrap();
    let grouped: Vec<WeightIx> =
        placed.groups().iter().filter(|g| g.contiguous).flat_map(|g| g.members[1..].to_vec()).collect();
    for t in Container::open(&bytes).unwrap().tensors().unwrap().iter().filter(|t| t.is_weight()) {
        assert_eq!((start + t.offset) % 64, 0, "{}", t.name);
        let inside_group = grouped.iter().any(|ix| placed[*ix].name == t.name);
        if t.len >= 64 << 10 && !inside_group {
            assert_eq!((start + t.offset) % (16 << 10), 0, "{}", t.name);
        }
    }
    let [qkv, scales] = placed.groups() else { panic!("two groups") };
    assert!(qkv.contiguous && !scales.contiguous);
    assert_eq!(qkv.offset % (16 << 10), 0);
    assert_eq!(qkv.len, [1, 3, 4].map(|i| placed[ix[i]].len).iter().sum::<u64>());
}

/// RFC 6962 §2.1, as it is written there, over leaves of 4 MiB.
fn naive_root(bytes: &[u8]) -> [u8; 32] {
    fn tree(leaves: &[&[u8]]) -> Vec<u8> {
        match leaves {
            [] => Sha256::digest([]).to_vec(),
            [leaf] => Sha256::digest([&[0], *leaf].concat()).to_vec(),
            _ => {
                let k = (0..).map(|e| 1usize << e).take_while(|k| *k < leaves.len()).last().unwrap();
                let (left, right) = leaves.split_at(k);
                Sha256::digest([vec![1], tree(left), tree(right)].concat()).to_vec()
            }
        }
    }
    tree(&bytes.chunks(1 << 22).collect::<Vec<_>>()).try_into().unwrap()
}

#[test]
fn roots_and_id_are_those_of_a_naive_implementation() {
    assert_eq!(LEAF_BYTES, 1 << 22);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rich.loaf");
    let id = write_rich(&path);
    let bytes = fs::read(&path).unwrap();
    let loaf = Container::open(&bytes).unwrap();
    assert_eq!(loaf.weights().len().div_ceil(1 << 22), 3, "an odd number of leaves, to be worth testing");
    let mut tree = Vec::new();
    for section in loaf.sections() {
        let content = &loaf.data()[section.offset as usize..section.end() as usize];
        assert_eq!(hex(&section.root), hex(&naive_root(content)), "kind {}", section.kind);
        if section.kind != SectionKind::HashTree.code() {
            tree.extend(content.chunks(1 << 22).flat_map(|leaf| Sha256::digest([&[0], leaf].concat())));
        }
    }
    assert_eq!(loaf.section(SectionKind::HashTree), Some(tree.as_slice()));
    let start = data_start(&bytes);
    assert_eq!(loaf.head().header_sha256.as_slice(), Sha256::digest(&bytes[..start]).as_slice());
    assert_eq!(id, hex(&Sha256::digest(&bytes[start..start + 2016]).into()));
}

#[test]
fn a_file_with_a_byte_missing_is_not_finished_and_not_left_behind() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.loaf");
    let begin = || {
        let mut layout = Layout::new();
        let a = layout.weight("a", DType::U8, &[10]).unwrap();
        let layout = FileLayout::new(layout.finish().unwrap(), &[(SectionKind::Plan, 3)]).unwrap();
        (Writer::create(&path, layout).unwrap(), a)
    };
    let refused = |fill: &dyn Fn(&Writer, WeightIx)| {
        let (writer, a) = begin();
        fill(&writer, a);
        assert!(!path.exists(), "nothing stands under the final name before the end");
        let error = writer.finish().unwrap_err().to_string();
        assert_eq!(names_in(folder.path()), [""; 0]);
        error
    };
    assert_eq!(
        refused(&|w, a| {
            w.write_section(SectionKind::Plan, b"abc").unwrap();
            w.write_at(a, 0, &[1; 9]).unwrap();
        }),
        "tensor \"a\": expected 10 bytes to be written, found 9"
    );
    assert_eq!(
        refused(&|w, a| w.write_at(a, 0, &[1; 10]).unwrap()),
        "section plan: expected 3 bytes to be written, found 0"
    );
    let complete = |w: &Writer, a| {
        w.write_section(SectionKind::Plan, b"abc").unwrap();
        w.write_at(a, 0, &[1; 10]).unwrap();
    };
    let failed = "file: an earlier write failed, so the file cannot be finished";
    assert_eq!(
        refused(&|w, a| {
            complete(w, a);
            assert!(matches!(w.write_at(a, 9, &[1; 2]), Err(Error::Range { .. })));
        }),
        failed
    );
    assert_eq!(
        refused(&|w, a| {
            complete(w, a);
            assert!(matches!(w.write_at(a, 9, &[1]), Err(Error::Rewritten { .. })));
        }),
        failed
    );
    assert_eq!(
        refused(&|w, a| {
            complete(w, a);
            assert!(matches!(w.write_section(SectionKind::Plan, b"abcd"), Err(Error::Field { .. })));
        }),
        failed
    );
    drop(begin());
    assert_eq!(names_in(folder.path()), [""; 0], "a writer that is dropped cleans up");

    let (writer, a) = begin();
    complete(&writer, a);
    let sealed = writer.seal().unwrap();
    assert!(sealed.finish(&[]).is_err(), "no leaves");
    assert_eq!(names_in(folder.path()), [""; 0]);
}

#[test]
fn an_older_file_is_replaced_whole_or_not_at_all() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.loaf");
    fs::write(&path, b"older").unwrap();
    let writer = Writer::create(&path, FileLayout::new(Layout::new().finish().unwrap(), &[]).unwrap()).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"older");
    writer.finish().unwrap();
    verify(&fs::read(&path).unwrap()).unwrap();
}

#[test]
fn every_truncation_and_extension_is_refused() {
    let bytes = small_loaf();
    verify(&bytes).unwrap();
    for len in (0..bytes.len()).step_by(97).chain(bytes.len() - 700..bytes.len()) {
        assert!(Container::open(&bytes[..len]).is_err(), "{len} bytes");
    }
    assert!(Container::open(&[&bytes[..], &[0]].concat()).is_err());
}

#[test]
fn versions_features_and_unknown_sections_follow_the_policy() {
    let bytes = small_loaf();
    let start = data_start(&bytes);
    let changed = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = bytes.clone();
        change(&mut bytes);
        reseal(&mut bytes);
        verify(&bytes)
    };
    changed(&|b| b[start + 10] += 1).expect("a newer minor version is read");
    assert!(matches!(changed(&|b| b[start + 8] += 1), Err(Error::Version { major: 3, .. })));
    assert!(matches!(changed(&|b| b[start + 23] = 0x80), Err(Error::Features { unknown: 0x8000_0000_0000_0000 })));
    changed(&|b| b[start + 24] = 1).expect("an optional feature is passed over");

    let golden = (0..16).map(|i| start + 96 + 64 * i).find(|at| bytes[*at] == SectionKind::Golden as u8).unwrap();
    let rename = |b: &mut Vec<u8>| {
        let name = b.windows(11).position(|w| w == b"loaf.golden").unwrap();
        b[name..name + 11].copy_from_slice(b"loaf.future");
    };
    changed(&|b| {
        b[golden] = 200;
        rename(b);
    })
    .expect("an unknown optional section is passed over");
    let required = changed(&|b| {
        b[golden] = 200;
        b[golden + 4] &= !(FLAG_OPTIONAL as u8);
        rename(b);
    });
    assert!(matches!(required, Err(Error::UnknownSection { kind: 200 })));
    assert!(changed(&|b| b[golden] = 200).is_err(), "an unknown section under a known name");
    assert!(changed(&rename).is_err(), "a known section under an unknown name");
}

#[test]
fn damaged_bytes_are_named_by_where_they_lie() {
    let bytes = small_loaf();
    let start = data_start(&bytes);
    let flipped = |at: usize| {
        let mut bytes = bytes.clone();
        bytes[at] ^= 1;
        verify(&bytes).unwrap_err().to_string()
    };
    let loaf = Container::open(&bytes).unwrap();
    let weights = loaf.head().section(SectionKind::Weights).unwrap().offset as usize;
    let plan = loaf.head().section(SectionKind::Plan).unwrap().offset as usize;
    assert!(flipped(start + weights).starts_with("section weights: leaf 0: hash: expected "));
    assert!(flipped(start + plan).starts_with("section plan: leaf 0: hash: expected "));
    assert!(flipped(start + plan - 1).starts_with(&format!("padding at data offset {}: expected 0x00", plan - 1)));
    assert!(flipped(start - 1).starts_with("header: hash: expected "));
    assert!(flipped(start).starts_with("loaf.head: not a loaf"));
    assert!(flipped(bytes.len() - 1).starts_with("section hashes: hash: expected "));
}

/// One way of tampering, with numbers to be taken modulo whatever they apply to.
#[derive(Clone, Debug)]
enum Tampering {
    Byte { at: usize, to: u8 },
    HeadByte { at: usize, to: u8 },
    JsonByte { at: usize, to: u8 },
    HeadWord { at: usize, to: u64 },
    JsonDigit { nth: usize, to: u8 },
    Truncate { len: usize },
    Extend { with: u8 },
    SwapEntries { a: usize, b: usize },
    SwapBlocks { a: usize, b: usize },
    Prefix { to: u64 },
}

fn tampering() -> impl Strategy<Value = Tampering> {
    let near = prop_oneof![
        any::<u64>(),
        (0u64..64).prop_map(|e| 1 << e),
        (0u64..64).prop_map(|e| u64::MAX >> e),
        0u64..100_000
    ];
    prop_oneof![
        any::<(usize, u8)>().prop_map(|(at, to)| Tampering::Byte { at, to }),
        any::<(usize, u8)>().prop_map(|(at, to)| Tampering::HeadByte { at, to }),
        any::<(usize, u8)>().prop_map(|(at, to)| Tampering::JsonByte { at, to }),
        (any::<usize>(), near.clone()).prop_map(|(at, to)| Tampering::HeadWord { at, to }),
        (any::<usize>(), b'0'..=b'9').prop_map(|(nth, to)| Tampering::JsonDigit { nth, to }),
        any::<usize>().prop_map(|len| Tampering::Truncate { len }),
        any::<u8>().prop_map(|with| Tampering::Extend { with }),
        any::<(usize, usize)>().prop_map(|(a, b)| Tampering::SwapEntries { a, b }),
        any::<(usize, usize)>().prop_map(|(a, b)| Tampering::SwapBlocks { a, b }),
        near.prop_map(|to| Tampering::Prefix { to }),
    ]
}

fn tamper(bytes: &mut Vec<u8>, how: &Tampering) {
    let (len, start) = (bytes.len(), data_start(bytes));
    // An earlier tampering may have moved or cut off what this one is about.
    let Some(head) = start.checked_add(HEAD_BYTES as usize).filter(|end| *end <= len).map(|_| start) else {
        return;
    };
    let json_end = bytes[8..start].iter().rposition(|b| *b == b'}').map_or(start, |i| 9 + i);
    match *how {
        Tampering::Byte { at, to } => bytes[at % len] = to,
        Tampering::HeadByte { at, to } => bytes[head + at % 608] = to,
        Tampering::JsonByte { at, to } => bytes[8 + at % (json_end - 7).min(len - 8)] = to,
        Tampering::HeadWord { at, to } => {
            let at = head + at % 76 * 8;
            bytes[at..at + 8].copy_from_slice(&to.to_le_bytes());
        }
        Tampering::JsonDigit { nth, to } => {
            let digits: Vec<usize> = (8..json_end).filter(|i| bytes[*i].is_ascii_digit()).collect();
            if !digits.is_empty() {
                bytes[digits[nth % digits.len()]] = to;
            }
        }
        Tampering::Truncate { len: to } => bytes.truncate((to % len).max(8)),
        Tampering::Extend { with } => bytes.push(with),
        Tampering::SwapEntries { a, b } => {
            let (a, b) = (head + 96 + a % 8 * 64, head + 96 + b % 8 * 64);
            (0..64).for_each(|i| bytes.swap(a + i, b + i));
        }
        Tampering::SwapBlocks { a, b } => {
            let blocks = (len - head) / 64;
            let (a, b) = (head + a % blocks * 64, head + b % blocks * 64);
            (0..64).for_each(|i| bytes.swap(a + i, b + i));
        }
        Tampering::Prefix { to } => bytes[..8].copy_from_slice(&to.to_le_bytes()),
    }
}

/// Runs `judge` on 10,000 tampered copies of a small loaf, the same ones every time.
fn tampered(most: usize, judge: impl Fn(&[u8], Vec<u8>)) {
    let original = small_loaf();
    let config = ProptestConfig { cases: 10_000, failure_persistence: None, ..ProptestConfig::default() };
    let rng = prop::test_runner::TestRng::deterministic_rng(prop::test_runner::RngAlgorithm::ChaCha);
    let mut runner = prop::test_runner::TestRunner::new_with_rng(config, rng);
    let result = runner.run(&prop::collection::vec(tampering(), 1..=most), |steps| {
        let mut bytes = original.clone();
        steps.iter().for_each(|how| tamper(&mut bytes, how));
        judge(&original, bytes);
        Ok(())
    });
    result.unwrap();
}

#[test]
fn ten_thousand_damaged_files_are_refused() {
    tampered(3, |original, bytes| {
        assert!(verify(&bytes).is_err() || bytes == original);
    });
}

#[test]
fn ten_thousand_files_forged_with_fitting_hashes_are_refused_or_have_another_id() {
    let accepted = std::cell::Cell::new(0u32);
    tampered(2, |original, mut bytes| {
        if data_start(&bytes).checked_add(HEAD_BYTES as usize).is_some_and(|end| end <= bytes.len()) {
            reseal(&mut bytes);
        }
        if let Ok(id) = verify(&bytes) {
            assert!(bytes == original || id != verify(original).unwrap());
            accepted.set(accepted.get() + u32::from(bytes != original));
            // What is accepted is also a file that every other reader sees as we do.
            let ours = Container::open(&bytes).unwrap().tensors().unwrap();
            let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            assert_eq!(ours.len(), theirs.len());
            for t in ours {
                let data = &Container::open(&bytes).unwrap().data()[t.offset as usize..(t.offset + t.len) as usize];
                assert!(theirs.tensor(&t.name).unwrap().data() == data, "{}", t.name);
            }
        }
    });
    assert!(accepted.get() > 0, "forgeries get as far as being accepted: {}", accepted.get());
}

#[test]
fn two_writers_of_one_path_do_not_disturb_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.loaf");
    let (first, ix) = {
        let (layout, ix) = rich_layout();
        (create(&path, layout), ix)
    };
    let id = write_rich(&path);
    for (w, ix) in ix.iter().enumerate() {
        first.write_at(*ix, 0, &content(w, first.layout().weights()[*ix].len)).unwrap();
    }
    for (kind, bytes) in SECTIONS {
        first.write_section(kind, bytes).unwrap();
    }
    assert_eq!(first.finish().unwrap().to_string(), id);
    assert_eq!(verify(&fs::read(&path).unwrap()).unwrap(), id);
    assert_eq!(names_in(folder.path()), ["x.loaf"]);
}

const KILLED_AT: &str = "LOAF_TEST_KILLED_WRITER";

/// Not a test of its own: what the next test starts as a process, to kill it.
#[test]
fn killed_writer() {
    let Some(path) = std::env::var_os(KILLED_AT) else { return };
    let (layout, ix) = rich_layout();
    let writer = create(Path::new(&path), layout);
    writer.write_at(ix[0], 0, &content(0, writer.layout().weights()[ix[0]].len)).unwrap();
    fs::write(Path::new(&path).with_extension("ready"), b"").unwrap();
    std::thread::sleep(std::time::Duration::from_secs(60));
}

#[test]
fn a_killed_writer_leaves_nothing_under_the_final_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.loaf");
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "killed_writer"])
        .env(KILLED_AT, &path)
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    while !path.with_extension("ready").exists() {
        assert!(child.try_wait().unwrap().is_none(), "the writer ended before it could be killed");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!path.exists());
    assert_eq!(names_in(folder.path()).len(), 2, "the temporary file was there, so there was something to kill");
    let id = write_rich(&path);
    assert_eq!(verify(&fs::read(&path).unwrap()).unwrap(), id);
    assert_eq!(names_in(folder.path()), ["x.loaf", "x.ready"], "the next writer cleans up");
}
