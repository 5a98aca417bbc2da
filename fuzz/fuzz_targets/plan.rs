//! Any bytes as a plan: what the verifier accepts keeps every operand of every record in its region, at positions that
//! the verifier's corners are not.
#![no_main]

use libfuzzer_sys::fuzz_target;
use loaf_formats::plan::{Plan, Region, records};

fuzz_target!(|bytes: &[u8]| {
    let Ok(plan) = Plan::decode(bytes) else { return };
    let Ok(plan) = plan.verify(1 << 20) else { return };
    let mut words = Vec::new();
    for family in &plan.families {
        let positions = u64::from(family.positions);
        for p in [0, 1, positions / 3, positions / 2, positions - 1] {
            let most = u64::from(family.max_rows).min(positions.saturating_sub(p));
            for n in [1, most / 2, most] {
                if p >= positions || n == 0 || n > most {
                    continue;
                }
                family.segments[family.segment_at(p)].expand(p, n, &mut words);
                for record in records(&words) {
                    let record = record.expect("verified");
                    for i in 0..record.kind.spec().operands.len() {
                        let operand = record.operand(i);
                        let len = match operand.region {
                            Region::None => continue,
                            Region::Weights => plan.weight_bytes,
                            Region::State => plan.state_bytes,
                            Region::Arena => plan.arena_bytes,
                            Region::Io => plan.io.bytes,
                        };
                        let dims = record.dims(i).expect("verified");
                        assert!(operand.span(dims).expect("verified").1 <= len);
                    }
                }
            }
        }
    }
});
