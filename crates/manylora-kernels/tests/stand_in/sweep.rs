//! Makes one call of one function of the driver or of cuBLASLt fail, each in turn, in a session that is repeated for it.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::{Held, StandIn};

/// What came of a sweep.
pub(crate) struct Swept {
    /// Functions that the session calls.
    pub(crate) functions: usize,
    /// Failures that were tried, and how many of them the session told of.
    pub(crate) runs: usize,
    pub(crate) noticed: usize,
    /// Functions of which a failure went unnoticed, though they give nothing back.
    pub(crate) unnoticed: BTreeSet<String>,
}

/// Functions that give something back: that thing is lost if they fail, and there is nobody to tell.
fn gives_back(function: &str) -> bool {
    ["Destroy", "Free", "Unload", "Release"].iter().any(|part| function.contains(part))
}

/// Runs `session` once for every failure: of the calls that `chosen` picks out of a function's number of calls, with the
/// codes of that function. `told(what, text)` looks at the error that came of it. No failure may panic or leave anything
/// behind, and afterwards the session ends well.
pub(crate) fn sweep<E: std::error::Error>(
    session: impl Fn() -> Result<(), E>,
    chosen: impl Fn(u64) -> Vec<u64>,
    codes: impl Fn(&str) -> &'static [i32],
    told: impl Fn(&str, &str),
) -> Swept {
    let stand_in = StandIn::get();
    stand_in.reset_counts();
    session().unwrap();
    stand_in.assert_nothing_held();
    let functions = stand_in.all_calls();
    let mut swept = Swept { functions: functions.len(), runs: 0, noticed: 0, unnoticed: BTreeSet::new() };
    let mut lost = Held::default();
    for (function, count) in &functions {
        for nth in chosen(*count) {
            for &code in codes(function) {
                let what = format!("call {nth} of {count} of `{function}` with {code}");
                // The last one that is told is the one that hangs.
                println!("{what}");
                stand_in.fail(function, nth, code);
                let result = catch_unwind(AssertUnwindSafe(&session));
                stand_in.forget_failures();
                match result {
                    Err(panic) => panic!("{what}: {panic:?}"),
                    Ok(Ok(())) if gives_back(function) => {}
                    Ok(Ok(())) => drop(swept.unnoticed.insert(function.clone())),
                    Ok(Err(error)) => {
                        swept.noticed += 1;
                        told(&what, &error.to_string());
                    }
                }
                let held = stand_in.held();
                if gives_back(function) {
                    lost = held;
                } else {
                    assert_eq!(held, lost, "left behind: {what}");
                }
                swept.runs += 1;
            }
        }
    }
    // Afterwards all is as before.
    session().unwrap();
    assert_eq!(stand_in.held(), lost);
    println!("{} failures of {} functions, {} of them errors", swept.runs, swept.functions, swept.noticed);
    swept
}
