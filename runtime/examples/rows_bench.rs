//! Steps of several sequences together:
//! `cargo run --release -p loaf-runtime --example rows_bench -- model.loaf cuda 128 1,2,4,8,16`
//! prints, for each number of rows, the median time of a step at that position, logits read by the
//! host, and tokens a second of all rows. The context before the position is filled with a pattern,
//! as `loaf bench --context` has it. One row is also timed with tokens that the device chooses.
//! With `check` in place of the backend, decode steps of a card are compared with the CPU's
//! instead, bit for bit, of one row after a prompt of that length and of rows after prompts of
//! several lengths up to it.

use std::time::Instant;

#[cfg(target_os = "linux")]
use loaf_runtime::backend::cuda::{CudaDevice, CudaOptions};
use loaf_runtime::sample::SamplerOptions;
use loaf_runtime::{Engine, EngineOptions, Model, Sequence};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let start = Instant::now();
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, backend, position, rows] = &args[..] else { return Err("MODEL cpu|cuda POSITION ROWS,..".into()) };
    let model = Model::open(model.as_ref())?;
    let (position, vocab) = (position.parse::<u32>()?, model.plan().vocab);
    if backend == "check" {
        return check(&model, position, rows);
    }
    let mut first = true;
    for rows in rows.split(',') {
        let slots = rows.parse::<u32>()?;
        let mut engine = match backend.as_str() {
            "cuda" => card(&model, slots)?,
            "cpu" => Engine::new(&model, EngineOptions { slots, ..EngineOptions::default() })?,
            other => return Err(format!("cpu, cuda or check, not {other}").into()),
        };
        let mut all: Vec<Sequence> = (0..slots).map(|_| engine.sequence()).collect::<Result<_, _>>()?;
        for sequence in &mut all {
            engine.pretend(sequence, position)?;
        }
        let mut times = Vec::new();
        for step in 0..60u32 {
            let ids = (0..slots).map(|i| (step * 7919 + i * 104_729 + 11) % vocab);
            let mut rows: Vec<(&mut Sequence, u32)> = all.iter_mut().zip(ids).collect();
            let before = Instant::now();
            engine.decode(&mut rows)?;
            times.push(before.elapsed().as_secs_f64());
            if std::mem::take(&mut first) {
                println!("first step {:.2} s after the program's start", start.elapsed().as_secs_f64());
            }
        }
        // The first steps make graphs.
        let mut times = times.split_off(10);
        times.sort_by(f64::total_cmp);
        let median = times[times.len() / 2];
        println!(
            "{slots:>3} rows at {position}: {:>8.1} us a step, {:>9.1} tok/s",
            median * 1e6,
            f64::from(slots) / median
        );
        if slots > 1 {
            let mut ids: Vec<u32> = (0..slots).map(|i| (i * 104_729 + 11) % vocab).collect();
            let mut times = Vec::new();
            for _ in 0..60 {
                let mut rows: Vec<(&mut Sequence, u32)> = all.iter_mut().zip(ids).collect();
                let before = Instant::now();
                let best = engine.decode_best(&mut rows, vocab)?;
                times.push(before.elapsed().as_secs_f64());
                ids = best.into_iter().map(|id| id.ok_or("no number")).collect::<Result<_, _>>()?;
            }
            let mut times = times.split_off(10);
            times.sort_by(f64::total_cmp);
            let median = times[times.len() / 2];
            println!(
                "{slots:>3} rows, tokens chosen by the device: {:>8.1} us a step, {:>9.1} tok/s",
                median * 1e6,
                f64::from(slots) / median
            );
        }
        let options = SamplerOptions::default();
        if let ([sequence], Some(_)) = (&mut all[..], engine.chooser(&options, false)) {
            let (pos, n) = (sequence.position(), 100);
            let chooser = engine.chooser(&options, false).ok_or("no chooser")?;
            chooser.start(&options, vocab, &[])?;
            chooser.next(pos, true)?;
            let start = Instant::now();
            for p in pos + 1..=pos + n {
                chooser.next(p, true)?;
            }
            let time = start.elapsed().as_secs_f64() / f64::from(n);
            chooser.end();
            println!(
                "  1 row at {pos}, tokens chosen by the device: {:>8.1} us, {:>9.1} tok/s",
                time * 1e6,
                1.0 / time
            );
        }
    }
    Ok(())
}

/// A card with so many slots.
#[cfg(target_os = "linux")]
fn card(model: &Model, slots: u32) -> Result<Engine, Box<dyn std::error::Error>> {
    let device = CudaDevice::open(model, CudaOptions { slots, ..CudaOptions::default() })?;
    Ok(Engine::on(model, Box::new(device)))
}

#[cfg(not(target_os = "linux"))]
fn card(_: &Model, _: u32) -> Result<Engine, Box<dyn std::error::Error>> {
    Err("the CUDA backend is there on Linux alone".into())
}

fn check(model: &Model, length: u32, rows: &str) -> Result<(), Box<dyn std::error::Error>> {
    let vocab = model.plan().vocab;
    let ids: Vec<u32> = (0..length + 8).map(|i| (i * 7919 + 11) % vocab).collect();
    let mut cpu = Engine::new(model, EngineOptions { slots: 1, ..EngineOptions::default() })?;
    let same = |a: &[f32], b: &[f32]| a.iter().zip(b).filter(|(x, y)| x.to_bits() != y.to_bits()).count();
    let lengths: Vec<usize> = (0..8).map(|i| (length as usize * (8 - i) / 8).max(1)).collect();
    let (mut snapshots, mut want) = (Vec::new(), Vec::new());
    {
        let mut one = card(model, 1)?;
        for &n in &lengths {
            let mut sequence = one.sequence()?;
            one.eval(&mut sequence, &ids[..n])?;
            let snapshot = one.snapshot(&sequence)?;
            let mut other = cpu.restore(&snapshot)?;
            let mut wrong = [0; 4];
            for (i, wrong) in wrong.iter_mut().enumerate() {
                let logits = cpu.decode_one(&mut other, ids[n + i])?.to_vec();
                *wrong = same(one.decode_one(&mut sequence, ids[n + i])?, &logits);
                if i == 0 {
                    want.push(logits);
                }
            }
            println!("after {n}: logits that differ in four tokens: {wrong:?}");
            snapshots.push(snapshot);
        }
    }
    for rows in rows.split(',') {
        let rows = rows.parse::<usize>()?;
        let mut engine = card(model, rows as u32)?;
        let mut all = (0..rows).map(|i| engine.restore(&snapshots[i % 8])).collect::<Result<Vec<_>, _>>()?;
        let mut parts: Vec<(&mut Sequence, u32)> =
            all.iter_mut().enumerate().map(|(i, s)| (s, ids[lengths[i % 8]])).collect();
        engine.decode(&mut parts)?;
        let wrong: Vec<usize> = (0..rows).map(|i| same(engine.logits(i), &want[i % 8])).collect();
        println!("{rows} rows together: logits that differ: {wrong:?}");
    }
    Ok(())
}
