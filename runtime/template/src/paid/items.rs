//! Lists of anything, paid for by capacity when they grow and by item when they are read.

use std::rc::Rc;

use super::budget::{Budget, Held};
use crate::error::Result;

/// What a list costs beside its buffer.
const OVERHEAD_BYTES: usize = 128;

/// A growing list of `T`.
pub(crate) struct Items<T> {
    items: Vec<T>,
    held: Held,
}

impl<T> Items<T> {
    pub(crate) fn new(budget: &Rc<Budget>) -> Result<Items<T>> {
        Ok(Items { items: Vec::new(), held: budget.hold(OVERHEAD_BYTES)? })
    }

    pub(crate) fn budget(&self) -> &Rc<Budget> {
        self.held.budget()
    }

    pub(crate) fn len(&self) -> usize {
        self.items.len()
    }

    pub(crate) fn add(&mut self, item: T) -> Result<()> {
        let budget = self.held.budget();
        budget.step()?;
        if self.items.len() == self.items.capacity() {
            let capacity = (self.items.capacity() * 2).max(4);
            // The old buffer stays paid for until the new one is filled, and moving the items is
            // work.
            let held = budget.hold(capacity.saturating_mul(size_of::<T>()).saturating_add(OVERHEAD_BYTES))?;
            budget.touch(self.items.len() * size_of::<T>())?;
            self.items.reserve_exact(capacity - self.items.len());
            self.held = held;
        }
        self.items.push(item);
        Ok(())
    }

    pub(crate) fn get(&self, index: usize) -> Result<Option<&T>> {
        self.budget().step()?;
        Ok(self.items.get(index))
    }

    pub(crate) fn get_mut(&mut self, index: usize) -> Result<Option<&mut T>> {
        self.held.budget().step()?;
        Ok(self.items.get_mut(index))
    }

    /// The items in order, a step each.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Result<&T>> {
        self.items.iter().map(|item| self.budget().step().map(|()| item))
    }

    /// Index of the first item with this number, which `number` takes from it in constant time.
    pub(crate) fn position(&self, wanted: u32, number: impl Fn(&T) -> u32) -> Result<Option<usize>> {
        self.budget().touch(self.items.len() * 8)?;
        Ok(self.items.iter().position(|item| number(item) == wanted))
    }

    pub(crate) fn reverse(&mut self) -> Result<()> {
        self.budget().touch(self.items.len() * size_of::<T>())?;
        self.items.reverse();
        Ok(())
    }

    /// Puts the items in order, those that are equal in the order they had. `less` may fail, and
    /// need not be an order at all (NaN is neither less than a number nor more), which is why this
    /// is not the standard library's sort: that may panic.
    pub(crate) fn sort(&mut self, mut less: impl FnMut(&T, &T) -> Result<bool>) -> Result<()> {
        let (budget, len) = (self.budget().clone(), self.items.len());
        let _scratch = budget.hold(len.saturating_mul(2 * size_of::<usize>() + size_of::<Option<T>>()))?;
        budget.touch(len.saturating_mul(size_of::<T>()))?;
        // Merges of ever longer runs, on indices.
        let (mut order, mut merged): (Vec<usize>, Vec<usize>) = ((0..len).collect(), Vec::with_capacity(len));
        let mut run = 1;
        while run < len {
            merged.clear();
            for pair in order.chunks(2 * run) {
                let (mut left, mut right) = pair.split_at(run.min(pair.len()));
                while let ([a, more_left @ ..], [b, more_right @ ..]) = (left, right) {
                    budget.step()?;
                    if less(&self.items[*b], &self.items[*a])? {
                        merged.push(*b);
                        right = more_right;
                    } else {
                        merged.push(*a);
                        left = more_left;
                    }
                }
                merged.extend(left.iter().chain(right));
            }
            std::mem::swap(&mut order, &mut merged);
            run *= 2;
        }
        let mut old: Vec<Option<T>> = self.items.drain(..).map(Some).collect();
        self.items.extend(order.into_iter().filter_map(|i| old[i].take()));
        Ok(())
    }
}
