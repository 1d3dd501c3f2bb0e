//! Where launches go.

use cubecl::ir::ElemType;
use cubecl::prelude::{AddressType, Client, CubeCount, CubeDim};

use crate::check::Check;
use crate::device::DeviceFacts;
use crate::error::KernelError;
use crate::grid::{Grid, address_type};
use crate::tensor::TensorRef;

/// A client to launch on, with the facts that plans are made from.
///
/// Cheap to make; every op takes one.
#[derive(Clone)]
pub struct Launcher {
    client: Client,
    facts: DeviceFacts,
}

impl Launcher {
    /// A launcher whose plans follow the properties of the device.
    pub fn new(client: Client) -> Self {
        let facts = DeviceFacts::of(&client);
        Self { client, facts }
    }

    /// A launcher whose plans follow `facts` in place of the device's properties.
    ///
    /// For tests that run a form of a kernel which the planner would not choose. Facts that
    /// promise more than the device has give launches that fail on the device.
    pub fn with_facts(client: Client, facts: DeviceFacts) -> Self {
        Self { client, facts }
    }

    /// The client that launches are queued on.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// What plans are made from.
    pub fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    /// The widest vector in which all of `tensors`, of one dtype, can be seen, if every row is cut
    /// at multiples of `rows`.
    pub(crate) fn vector_size(
        &self,
        dtype: ElemType,
        rows: &[usize],
        tensors: &[&TensorRef],
    ) -> usize {
        let rows = rows.iter().copied();
        let aligned = tensors.iter().map(|tensor| tensor.row_alignment());
        let alignment = rows.chain(aligned).fold(0, crate::tensor::gcd);
        self.facts.vector_size(dtype.size(), alignment)
    }

    /// The arguments that start every launch: the grid and the width of indices into `tensors`,
    /// seen as vectors of `vector_size`.
    pub(crate) fn topology(
        &self,
        check: Check,
        grid: Option<Grid>,
        vector_size: usize,
        tensors: &[&TensorRef],
    ) -> Result<(CubeCount, CubeDim, AddressType), KernelError> {
        let Some(grid) = grid else {
            let limit = self.facts.max_cube_count;
            return check.too_large(format!("more cubes than {limit:?} along x, y and z"));
        };
        let vectors = tensors
            .iter()
            .filter_map(|tensor| tensor.span())
            .max()
            .unwrap_or(0);
        let address = address_type(&grid, vectors / vector_size);
        if address == AddressType::U64 && !self.facts.wide_addresses {
            return check.unsupported(format!(
                "{vectors} elements in vectors of {vector_size} need 64-bit indices, which this \
                 device lacks"
            ));
        }
        Ok((grid.count(), grid.dim(), address))
    }
}
