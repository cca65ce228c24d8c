//! What a card can do at most, measured on it.

use std::time::Instant;

use manylora_kernels::cuda::{Arena, BlasLibrary, CudaError, Device, Holding};

/// Bytes that are copied, and how often.
const COPIED_BYTES: usize = 512 << 20;
const COPIES: usize = 20;

/// Bytes per second that a copy within the card's memory reads and writes: the floor that results are read against.
pub fn copied_per_second(device: &Device) -> Result<f64, CudaError> {
    let (context, stream) = (device.context(), device.compute());
    let bytes = if context.library().is_emulated() { 1 << 16 } else { COPIED_BYTES };
    let arena = Arena::reserve(context, 2 * bytes)?;
    let mut from = arena.allocate::<u8>(Holding::Buffers, "the bench's copy", bytes)?;
    let mut to = arena.allocate::<u8>(Holding::Buffers, "the bench's copy", bytes)?;
    from.fill_zero(stream)?;
    let mut fastest = f64::INFINITY;
    for _ in 0..3 {
        to.copy_from(stream, 0, &from, 0..bytes)?;
        stream.synchronize()?;
        let start = Instant::now();
        for _ in 0..COPIES {
            to.copy_from(stream, 0, &from, 0..bytes)?;
        }
        stream.synchronize()?;
        fastest = fastest.min(start.elapsed().as_secs_f64() / COPIES as f64);
    }
    Ok(2.0 * bytes as f64 / fastest)
}

/// The card, what of its memory is free, and where its base products come from, for people.
pub fn describe(device: &Device) -> Result<String, CudaError> {
    let free = device.context().memory()?.free as f64 / f64::from(1 << 30);
    let products = match BlasLibrary::load(&[]) {
        Ok(library) => format!("cuBLASLt {} of {}", library.version(), library.path()),
        Err(error) => format!("no cuBLASLt ({error})"),
    };
    Ok(format!("{}, {free:.1} GiB free, {products}", device.describe()))
}
