//! Many sequences on one engine: rows computed together have the bits of rows computed alone,
//! whatever they are computed with, and a sequence can be forked, taken back, put aside and put
//! back.

use loaf_bake::build::BuildOptions;
use loaf_runtime::engine::EngineError;
use loaf_runtime::kernels::{Isa, Kernels};
use loaf_runtime::{Engine, Model, Sequence, Snapshot};
use loaf_tests::{Expected, assert_bits, bake, decode_logits, engine, fixtures, session};

/// Tables that are quick enough to be tried on everything.
fn tables() -> impl Iterator<Item = Kernels> {
    Kernels::all().filter(|kernels| kernels.isa() != Isa::Naive)
}

/// Logits after each of `ids`, token by token, alone.
fn alone(model: &Model, ids: &[u32]) -> Vec<Vec<f32>> {
    decode_logits(&mut session(model, Kernels::detect(), 1), ids)
}

/// The tokens that sequence `i` of a test holds: another text each.
fn text(ids: &[u32], i: usize, n: usize) -> Vec<u32> {
    ids.iter().cycle().skip(7 * i).step_by(1 + i % 3).take(n).copied().collect()
}

fn of(engine: &Engine, rows: usize) -> Vec<Vec<f32>> {
    (0..rows).map(|row| engine.logits(row).to_vec()).collect()
}

/// Sequences of different lengths take steps together, in changing company.
fn check_together(name: &str, model: &Model, ids: &[u32]) {
    const SEQUENCES: usize = 5;
    const STEPS: usize = 6;
    let start = |i: usize| 1 + 9 * i;
    let texts: Vec<Vec<u32>> = (0..SEQUENCES).map(|i| text(ids, i, start(i) + STEPS)).collect();
    let want: Vec<Vec<Vec<f32>>> = texts.iter().map(|t| alone(model, t)).collect();
    for (kernels, threads) in tables().map(|k| (k, 1)).chain([(Kernels::detect(), 3)]) {
        let what = format!("{name}, {}, {threads} threads", kernels.isa().name());
        let mut engine = engine(model, kernels, threads, SEQUENCES as u32);
        let mut all: Vec<Sequence> = (0..SEQUENCES).map(|_| engine.sequence().expect("a slot")).collect();
        // All prompts in one prefill step, as far as they fit.
        let mut parts: Vec<(&mut Sequence, &[u32])> =
            all.iter_mut().enumerate().map(|(i, s)| (s, &texts[i][..start(i)])).collect();
        let total: usize = (0..SEQUENCES).map(start).sum();
        assert!(total <= engine.chunk(), "{name}: one step is what this is about");
        engine.prefill(&mut parts).expect("a step that fits");
        let last: Vec<u32> = (0..SEQUENCES).map(|i| (0..=i).map(start).sum::<usize>() as u32 - 1).collect();
        engine.logits_of(&last).expect("rows of the step");
        let ends: Vec<Vec<f32>> = (0..SEQUENCES).map(|i| want[i][start(i) - 1].clone()).collect();
        assert_bits(&format!("{what}: prompts together"), &of(&engine, SEQUENCES), &ends);
        for step in 0..STEPS {
            // One of them sits out each step but the last, and they come in another order each
            // time.
            let mut rows: Vec<(usize, &mut Sequence)> =
                all.iter_mut().enumerate().filter(|(i, _)| step + 1 == STEPS || i % STEPS != step).collect();
            let turn = step % rows.len();
            rows.rotate_left(turn);
            let at: Vec<(usize, usize)> = rows.iter().map(|(i, s)| (*i, s.position() as usize)).collect();
            let mut rows: Vec<(&mut Sequence, u32)> =
                rows.into_iter().zip(&at).map(|((_, s), (i, p))| (s, texts[*i][*p])).collect();
            engine.decode(&mut rows).expect("a step that fits");
            let expected: Vec<Vec<f32>> = at.iter().map(|(i, p)| want[*i][*p].clone()).collect();
            assert_bits(&format!("{what}: step {step}"), &of(&engine, at.len()), &expected);
        }
    }
}

#[test]
fn rows_together_have_the_bits_of_rows_alone() {
    for name in fixtures("hf") {
        let baked = bake(&name, &BuildOptions { chunks: vec![128], ..BuildOptions::default() });
        check_together(&name, &baked.loaf, &Expected::read(&name).ids);
    }
}

/// As many sequences as a step has room for, some of them beyond one and two blocks of attention;
/// and the hidden rows that a step leaves.
#[test]
fn sixteen_sequences_step_together_at_any_distance() {
    const SEQUENCES: usize = 16;
    for name in ["hf/qwen3", "hf/qwen3_next"] {
        let options = BuildOptions { context: Some(640), chunks: vec![128], ..BuildOptions::default() };
        let baked = bake(name, &options);
        let ids = Expected::read(name).ids;
        let texts: Vec<Vec<u32>> = (0..SEQUENCES).map(|i| text(&ids, i, 2 + 36 * i)).collect();
        let mut single = engine(&baked.loaf, Kernels::detect(), 1, 1);
        let mut prompts = Vec::new();
        let mut want = Vec::new();
        for t in &texts {
            let mut sequence = single.sequence().expect("a slot");
            let (last, before) = t.split_last().expect("ids");
            single.eval(&mut sequence, before).expect("a prompt");
            want.push((
                single.decode_one(&mut sequence, *last).expect("a step").to_vec(),
                single.hidden(0).map(<[f32]>::to_vec),
            ));
            single.rewind(&mut sequence, 0).expect("the beginning");
            single.prefill(&mut [(&mut sequence, &t[..t.len().min(128)])]).expect("a step that fits");
            prompts.push(single.hidden(t.len().min(128) - 1).map(<[f32]>::to_vec));
        }
        // What decode leaves is what prefill does, where both had the whole text.
        for (i, t) in texts.iter().enumerate().filter(|(_, t)| t.len() <= 128) {
            assert!(want[i].1.is_some() && want[i].1 == prompts[i], "{name}: the hidden row after {} ids", t.len());
        }
        for kernels in tables() {
            let what = format!("{name}, {}", kernels.isa().name());
            let mut engine = engine(&baked.loaf, kernels, 2, SEQUENCES as u32);
            let mut all: Vec<Sequence> = (0..SEQUENCES).map(|_| engine.sequence().expect("a slot")).collect();
            for (sequence, t) in all.iter_mut().zip(&texts) {
                engine.eval(sequence, &t[..t.len() - 1]).expect("a prompt");
            }
            let mut rows: Vec<(&mut Sequence, u32)> =
                all.iter_mut().zip(&texts).map(|(s, t)| (s, t[t.len() - 1])).collect();
            engine.decode(&mut rows).expect("a step that fits");
            let expected: Vec<Vec<f32>> = want.iter().map(|(logits, _)| logits.clone()).collect();
            assert_bits(&what, &of(&engine, SEQUENCES), &expected);
            let hidden = (0..SEQUENCES).map(|row| engine.hidden(row).expect("on the CPU").to_vec());
            let expected = want.iter().map(|(_, hidden)| hidden.clone().expect("on the CPU"));
            assert_bits(&format!("{what}: hidden rows"), &hidden.collect::<Vec<_>>(), &expected.collect::<Vec<_>>());
        }
    }
}

#[test]
fn quantised_rows_together_have_the_bits_of_rows_alone() {
    for name in fixtures("mlx") {
        let baked = bake(&name, &BuildOptions { chunks: vec![128], ..BuildOptions::default() });
        let vocab = baked.loaf.plan().vocab;
        let ids: Vec<u32> = (0..64).map(|i| i * 37 % vocab).collect();
        check_together(&name, &baked.loaf, &ids);
    }
}

#[test]
fn several_rows_of_one_sequence_have_logits_each_and_can_be_taken_back() {
    for name in ["hf/qwen3", "hf/mistral", "hf/qwen3_next", "hf/qwen3_5_moe"] {
        let baked = bake(name, &BuildOptions::default());
        let ids = Expected::read(name).ids;
        let want = alone(&baked.loaf, &ids[..48]);
        for kernels in tables() {
            let what = format!("{name}, {}", kernels.isa().name());
            let mut engine = engine(&baked.loaf, kernels, 2, 1);
            let mut sequence = engine.sequence().expect("a slot");
            engine.eval(&mut sequence, &ids[..10]).expect("a prompt");
            let mut wrong = ids[10..18].to_vec();
            wrong[3] = (wrong[3] + 1) % baked.loaf.plan().vocab;
            // Drafted tokens, of which the first three are right; then all of the next sixteen;
            // then a step back to before.
            engine.extend(&mut sequence, &wrong).expect("a step that fits");
            assert_bits(&format!("{what}: a draft"), &of(&engine, 3), &want[10..13]);
            engine.rewind(&mut sequence, 13).expect("the state after each row was kept");
            engine.extend(&mut sequence, &ids[13..29]).expect("a step that fits");
            assert_bits(&format!("{what}: the next"), &of(&engine, 16), &want[13..29]);
            engine.rewind(&mut sequence, 13).expect("the state before the step was kept");
            let logits = engine.decode_one(&mut sequence, ids[13]).expect("one token").to_vec();
            assert_bits(&format!("{what}: before it"), &[logits], &want[13..14]);
            assert_eq!(sequence.ids(), &ids[..14], "{what}");
        }
    }
}

#[test]
fn forks_and_snapshots_go_on_as_the_sequence_would() {
    for name in ["hf/llama3", "hf/qwen3_next", "hf/qwen3_5"] {
        let baked = bake(name, &BuildOptions::default());
        let ids = Expected::read(name).ids;
        let want = alone(&baked.loaf, &ids[..40]);
        let mut engine = engine(&baked.loaf, Kernels::detect(), 2, 3);
        let mut first = engine.sequence().expect("a slot");
        engine.eval(&mut first, &ids[..21]).expect("a prompt");
        // In a version other than the first, so that copying has to look for it.
        engine.extend(&mut first, &ids[21..25]).expect("a few rows");
        let mut second = engine.fork(&first).expect("a slot");
        let snapshot = engine.snapshot(&first).expect("memory");
        // The others go their own ways.
        engine.eval(&mut first, &ids[..7]).expect("something else");
        drop(first);
        let logits = engine.decode_one(&mut second, ids[25]).expect("one token").to_vec();
        assert_bits(&format!("{name}: a fork"), &[logits], &want[25..26]);
        let copy = Snapshot::from_parts(snapshot.ids().to_vec(), snapshot.state().to_vec());
        assert_eq!(copy, snapshot);
        let mut third = engine.restore(&copy).expect("a slot");
        let logits = engine.eval(&mut third, &ids[25..40]).expect("the rest").to_vec();
        assert_bits(&format!("{name}: a snapshot"), &[logits], &want[39..40]);
        assert_eq!(third.ids(), &ids[..40]);
        // In another engine, too.
        let mut other = loaf_tests::engine(&baked.loaf, Kernels::scalar(), 1, 1);
        let mut fourth = other.restore(&snapshot).expect("a slot");
        let logits = other.decode_one(&mut fourth, ids[25]).expect("one token").to_vec();
        assert_bits(&format!("{name}: elsewhere"), &[logits], &want[25..26]);
        let state = snapshot.state()[1..].to_vec();
        let short = engine.restore(&Snapshot::from_parts(ids[..25].to_vec(), state));
        assert!(matches!(short, Err(EngineError::Snapshot { .. })), "{name}: {short:?}");
    }
}

#[test]
fn a_marked_position_can_be_gone_back_to() {
    let name = "hf/qwen3_next";
    let baked = bake(name, &BuildOptions::default());
    let ids = Expected::read(name).ids;
    let want = alone(&baked.loaf, &ids[..30]);
    let mut engine = engine(&baked.loaf, Kernels::detect(), 1, 1);
    let mut sequence = engine.sequence().expect("a slot");
    engine.eval(&mut sequence, &ids[..12]).expect("a prompt");
    engine.mark(&mut sequence).expect("memory");
    engine.eval(&mut sequence, &ids[12..20]).expect("more");
    assert_eq!([20, 19, 12, 11].map(|to| sequence.rewind_point(to)), [20, 12, 12, 0]);
    assert!(matches!(engine.rewind(&mut sequence, 15), Err(EngineError::Rewind { possible: 12, .. })));
    engine.rewind(&mut sequence, 12).expect("it was marked");
    let logits = engine.eval(&mut sequence, &ids[12..30]).expect("the rest").to_vec();
    assert_bits("after a mark", &[logits], &want[29..30]);
    // What stood after it is forgotten with it.
    engine.rewind(&mut sequence, 0).expect("the start always can");
    assert_eq!(sequence.rewind_point(12), 0);
}

#[test]
fn states_that_are_held_stay_as_they_are_whatever_follows() {
    for name in ["hf/qwen3_next", "hf/qwen3_5_moe"] {
        let baked = bake(name, &BuildOptions::default());
        let ids = Expected::read(name).ids;
        let want = alone(&baked.loaf, &ids[..40]);
        for kernels in tables() {
            let what = format!("{name}, {}", kernels.isa().name());
            let mut engine = engine(&baked.loaf, kernels, 2, 2);
            let mut sequence = engine.sequence().expect("a slot");
            let bytes = engine.recurrent_bytes();
            let shown = |engine: &Engine, sequence: &Sequence, at: u32, piece: u64| {
                let mut out = Vec::new();
                for from in (0..bytes).step_by(piece as usize) {
                    let to = bytes.min(from + piece);
                    engine.show_recurrent(sequence, at, from..to, &mut |b| out.extend_from_slice(b)).expect("held");
                }
                out
            };
            assert!(!engine.hold(&mut sequence).expect("its own"), "{what}: nothing to hold yet");
            // After a prompt, a second one, and single tokens.
            engine.eval(&mut sequence, &ids[..10]).expect("a prompt");
            let mut state = vec![0; bytes as usize];
            engine.save_recurrent(&sequence, &mut state).expect("memory");
            assert!(engine.hold(&mut sequence).expect("its own") && engine.hold(&mut sequence).expect("its own"));
            engine.eval(&mut sequence, &ids[10..20]).expect("more");
            assert!(engine.hold(&mut sequence).expect("its own"));
            for id in &ids[20..23] {
                engine.decode_one(&mut sequence, *id).expect("a token");
            }
            assert!(engine.hold(&mut sequence).expect("its own"));
            let logits = engine.eval(&mut sequence, &ids[23..30]).expect("the rest").to_vec();
            assert_bits(&format!("{what}: past held states"), &[logits], &want[29..30]);
            assert_eq!(engine.held(&sequence), [10, 20, 23], "{what}");
            engine.trim(&mut sequence);
            assert!(shown(&engine, &sequence, 10, 1000) == state, "{what}: the state at 10 in pieces");
            assert!(matches!(
                engine.show_recurrent(&sequence, 11, 0..bytes, &mut |_| ()),
                Err(EngineError::Rewind { to: 11, .. })
            ));
            // Another end after the second; then back to the first, twice.
            engine.rewind(&mut sequence, 20).expect("it is held");
            let logits = engine.eval(&mut sequence, &ids[20..40]).expect("the rest").to_vec();
            assert_bits(&format!("{what}: another end"), &[logits], &want[39..40]);
            assert_eq!(engine.held(&sequence), [10, 20], "{what}: what was cut off is gone");
            for _ in 0..2 {
                engine.rewind(&mut sequence, 10).expect("it is held");
                assert_eq!(engine.held(&sequence), [10], "{what}");
                assert!(shown(&engine, &sequence, 10, bytes) == state, "{what}: the state at 10");
                let logits = engine.eval(&mut sequence, &ids[10..16]).expect("the rest").to_vec();
                assert_bits(&format!("{what}: from the first"), &[logits], &want[15..16]);
            }
            // A state that is brought back takes no held one's place.
            engine.load_recurrent(&mut sequence, 10, &state).expect("as it was");
            let logits = engine.eval(&mut sequence, &ids[10..16]).expect("the rest").to_vec();
            assert_bits(&format!("{what}: brought back"), &[logits], &want[15..16]);
            assert!(shown(&engine, &sequence, 10, bytes) == state, "{what}: the state at 10, later");
            // As many as there is room for, and one more once one is let go.
            let mut held = 1;
            while engine.hold(&mut sequence).expect("its own") {
                engine.decode_one(&mut sequence, ids[16]).expect("a token");
                held += 1;
            }
            assert_eq!(held, engine.limits().versions - 1, "{what}");
            engine.let_go(&mut sequence, 10);
            assert!(engine.hold(&mut sequence).expect("its own"), "{what}");
            engine.decode_one(&mut sequence, ids[16]).expect("a token");
            // The slot is as good as new.
            drop(sequence);
            let mut after = engine.sequence().expect("the slot");
            let logits = engine.eval(&mut after, &ids[..9]).expect("a prompt").to_vec();
            assert_bits(&format!("{what}: a used slot"), &[logits], &want[8..9]);
        }
    }
    let baked = bake("hf/llama3", &BuildOptions::default());
    let mut engine = engine(&baked.loaf, Kernels::detect(), 1, 1);
    let mut sequence = engine.sequence().expect("a slot");
    engine.eval(&mut sequence, &[1, 2]).expect("a prompt");
    assert!(!engine.hold(&mut sequence).expect("its own"), "a model without such state needs none of it");
}

#[test]
fn what_does_not_fit_together_is_refused_and_changes_nothing() {
    let baked = bake("hf/qwen3", &BuildOptions::default());
    let vocab = baked.loaf.plan().vocab;
    let mut one = engine(&baked.loaf, Kernels::detect(), 1, 2);
    let (mut a, mut b) = (one.sequence().expect("a slot"), one.sequence().expect("a slot"));
    assert!(matches!(one.sequence(), Err(EngineError::NoSlot { slots: 2 })));
    assert!(matches!(one.decode(&mut [(&mut a, 1), (&mut b, vocab)]), Err(EngineError::UnknownToken { .. })));
    assert_eq!((a.position(), b.position()), (0, 0));
    assert!(matches!(one.extend(&mut a, &[1; 17]), Err(EngineError::StepTooLong { most: 16, found: 17 })));
    assert!(matches!(one.eval(&mut a, &[]), Err(EngineError::Empty)));
    assert!(matches!(one.logits_of(&[0]), Err(EngineError::Row { rows: 0, found: 0 })));
    let mut other = engine(&baked.loaf, Kernels::detect(), 1, 1);
    assert!(matches!(other.eval(&mut a, &[1]), Err(EngineError::OtherEngine)));
    drop(a);
    assert_eq!(one.free_slots(), 1);
    let c = one.sequence().expect("the slot is free again");
    assert_eq!((c.position(), one.free_slots()), (0, 0));
}

/// A sequence on a slot that another one left starts from nothing.
#[test]
fn a_slot_that_was_used_is_as_good_as_new() {
    let baked = bake("hf/qwen3_next", &BuildOptions::default());
    let ids = Expected::read("hf/qwen3_next").ids;
    let mut engine = engine(&baked.loaf, Kernels::detect(), 1, 1);
    let mut before = engine.sequence().expect("a slot");
    engine.eval(&mut before, &ids[20..40]).expect("something");
    engine.extend(&mut before, &ids[..4]).expect("something else");
    drop(before);
    let mut after = engine.sequence().expect("the slot");
    let logits = engine.eval(&mut after, &ids[..9]).expect("a prompt").to_vec();
    assert_bits("a used slot", &[logits], &alone(&baked.loaf, &ids[..9])[8..]);
}
