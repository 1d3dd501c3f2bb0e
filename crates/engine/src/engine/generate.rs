//! Whole answers, for callers that do not stream.

use std::collections::HashMap;

use super::Engine;
use crate::{Completion, Request, RequestError, RequestId};

impl Engine {
    /// Runs requests to their ends and returns the whole answers, in the order of the requests.
    ///
    /// Other live requests go on meanwhile; their events come out of the next [`step`](Self::step).
    ///
    /// # Errors
    /// [`RequestError`] of the first request that was refused; then none of them runs.
    pub fn generate(
        &mut self,
        requests: impl IntoIterator<Item = Request>,
    ) -> Result<Vec<Completion>, RequestError> {
        let mut ids = Vec::new();
        for request in requests {
            match self.add_request(request) {
                Ok(id) => ids.push(id),
                Err(error) => {
                    for id in ids {
                        self.abort(id);
                    }
                    return Err(error);
                }
            }
        }
        let mut completions: HashMap<RequestId, Completion> =
            ids.iter().map(|id| (*id, Completion::new(*id))).collect();
        let mut events = Vec::new();
        while ids.iter().any(|id| self.generations.contains_key(id)) {
            self.run_step(&mut events);
            for event in events.drain(..) {
                match completions.get_mut(&event.request_id) {
                    Some(completion) => completion.push(event),
                    None => self.undelivered.push(event),
                }
            }
        }
        Ok(ids.iter().filter_map(|id| completions.remove(id)).collect())
    }
}
