//! Memory: what is written comes back, every byte is counted, and copies keep their order.

use std::sync::Arc;

use manylora_kernels::cuda::{
    Arena, Context, CudaError, GRANULE, Holding, Readback, StepBlock, StepLayout, Stream, Uploader, granules,
};

use crate::stand_in::StandIn;

fn open() -> (Arc<Context>, Arc<Stream>) {
    let context = Context::open(0).unwrap();
    let stream = Arc::new(Stream::new(&context).unwrap());
    (context, stream)
}

/// Bytes that look like nothing else.
fn noise(len: usize, seed: u32) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}

pub(crate) fn values_come_back() {
    let (context, stream) = open();
    let arena = Arena::reserve(&context, 1 << 20).unwrap();
    let mut first = arena.allocate::<f32>(Holding::Buffers, "first", 1000).unwrap();
    let mut second = arena.allocate::<f32>(Holding::Weights, "second", 1000).unwrap();
    let values: Vec<f32> = (0..1000).map(|index| index as f32 * 0.5).collect();
    first.write(&stream, 0, &values).unwrap();
    second.fill_zero(&stream).unwrap();
    second.copy_from(&stream, 100, &first, 0..500).unwrap();
    second.write(&stream, 0, &[-1.0, -2.0]).unwrap();
    let mut back = vec![f32::NAN; 1000];
    second.read(&stream, 0, &mut back).unwrap();
    let expected: Vec<f32> = (0..1000)
        .map(|index| match index {
            0 => -1.0,
            1 => -2.0,
            100..600 => values[index - 100],
            _ => 0.0,
        })
        .collect();
    assert_eq!(back, expected);
    let mut part = [0.0; 3];
    first.read(&stream, 997, &mut part).unwrap();
    assert_eq!(part, values[997..]);
    // Nothing is a range too.
    first.write(&stream, 1000, &[]).unwrap();
    let mut empty = arena.allocate::<u8>(Holding::Buffers, "empty", 0).unwrap();
    empty.fill_zero(&stream).unwrap();
    drop((first, second, empty, arena, stream, context));
    StandIn::get().assert_nothing_held();
}

pub(crate) fn every_byte_is_counted() {
    let (context, _stream) = open();
    let before = context.memory().unwrap().free;
    let arena = Arena::reserve(&context, 100 * GRANULE).unwrap();
    assert!(before - context.memory().unwrap().free >= 100 * GRANULE);
    let weights = arena.allocate::<u16>(Holding::Weights, "weights", 10 * GRANULE).unwrap();
    let adapters = arena.region(Holding::Adapters, "adapters", 30 * GRANULE).unwrap();
    let usage = arena.usage();
    assert_eq!((usage.held(Holding::Weights), usage.held(Holding::Adapters)), (20 * GRANULE, 30 * GRANULE));
    assert_eq!((usage.free, usage.largest, usage.capacity), (50 * GRANULE, 50 * GRANULE, 100 * GRANULE));
    // In the region: three blobs, the middle one goes, and something smaller takes its place.
    let blob = |bytes: usize| adapters.allocate::<u8>(Holding::Adapters, "adapter `a`", bytes);
    let (low, middle, high) = (blob(1).unwrap(), blob(9 * GRANULE + 1).unwrap(), blob(19 * GRANULE).unwrap());
    assert_eq!((low.taken(), middle.taken(), high.taken()), (granules(1), 10 * GRANULE, 19 * GRANULE));
    assert_eq!(adapters.usage().free, 0);
    assert_eq!(
        blob(1).unwrap_err(),
        CudaError::OutOfMemory { what: "adapter `a`".to_owned(), bytes: 1, free: 0, largest: 0 }
    );
    let place = middle.pointer();
    drop(middle);
    let smaller = blob(4 * GRANULE).unwrap();
    assert_eq!(smaller.pointer(), place);
    assert_eq!((adapters.usage().free, adapters.usage().largest), (6 * GRANULE, 6 * GRANULE));
    assert_eq!(place.address() % GRANULE as u64, 0);
    // The region is whole in the arena's books until its last part is gone.
    drop(adapters);
    assert_eq!(arena.usage().held(Holding::Adapters), 30 * GRANULE);
    drop((low, smaller, high));
    assert_eq!(arena.usage().held(Holding::Adapters), 0);
    drop(weights);
    assert_eq!(arena.usage().largest, 100 * GRANULE);
    drop(arena);
    assert_eq!(context.memory().unwrap().free, before);
}

pub(crate) fn ranges_outside_are_errors() {
    let (context, stream) = open();
    let arena = Arena::reserve(&context, 1 << 16).unwrap();
    let mut slice = arena.allocate::<u32>(Holding::Buffers, "numbers", 10).unwrap();
    let other = arena.allocate::<u32>(Holding::Buffers, "others", 20).unwrap();
    let outside = |result: Result<(), CudaError>| assert!(matches!(result, Err(CudaError::Range { len: 10 | 20, .. })));
    outside(slice.write(&stream, 8, &[1, 2, 3]));
    outside(slice.write(&stream, usize::MAX, &[1]));
    outside(slice.read(&stream, 11, &mut []));
    outside(slice.copy_from(&stream, 5, &other, 0..6));
    outside(slice.copy_from(&stream, 0, &other, 19..21));
    let mut results = Readback::<u32>::new(&context, 4).unwrap();
    outside(results.fetch(&stream, &slice, 7, 4));
    assert!(matches!(results.fetch(&stream, &slice, 0, 5), Err(CudaError::Range { len: 4, .. })));
    let uploader = Uploader::new(&stream, 2, 256).unwrap();
    let mut blob = arena.allocate::<u8>(Holding::Adapters, "blob", 10).unwrap();
    assert!(matches!(uploader.upload(&mut blob, 3, &[0; 8]), Err(CudaError::Range { .. })));
}

pub(crate) fn out_of_memory() {
    let (context, _stream) = open();
    let error = Arena::reserve(&context, 1 << 40).unwrap_err();
    let CudaError::OutOfMemory { bytes, free, .. } = &error else { panic!("{error:?}") };
    assert_eq!(*bytes, 1 << 40);
    assert!(*free > 0 && *free <= 1 << 24 && error.is_out_of_memory(), "{error}");
    // The device is none the worse for it.
    let free = context.memory().unwrap().free;
    let arena = Arena::reserve(&context, free / 2).unwrap();
    assert!(arena.allocate::<u64>(Holding::Shared, "KV cache", usize::MAX).unwrap_err().is_out_of_memory());
    drop(arena);
    assert_eq!(context.memory().unwrap().free, free);
}

pub(crate) fn uploads_are_whole_and_wait_for_readers() {
    let (context, compute) = open();
    let arena = Arena::reserve(&context, 1 << 20).unwrap();
    let uploader = Uploader::new(&compute, 2, 1000).unwrap();
    let mut kept = arena.allocate::<u8>(Holding::Buffers, "what the old reader saw", 12_345).unwrap();
    let mut old = None;
    // Each blob takes the place of the last one, of which a copy is queued on the compute stream but need not have run.
    for round in 0..4 {
        let bytes = noise(12_345, round);
        let mut blob = arena.allocate::<u8>(Holding::Adapters, "blob", 12_345).unwrap();
        let mut source = bytes.clone();
        let upload = uploader.upload(&mut blob, 0, &source).unwrap();
        // The source may be used for something else at once.
        source.fill(0xAA);
        if let Some((before, place)) = old.replace((bytes.clone(), blob.pointer())) {
            assert_eq!(place, blob.pointer());
            let mut seen = vec![0u8; 12_345];
            kept.read(&compute, 0, &mut seen).unwrap();
            assert!(seen == before, "round {round}: a queued reader saw the next blob");
        }
        upload.before(&compute).unwrap();
        kept.copy_from(&compute, 0, &blob, 0..12_345).unwrap();
        if round == 0 {
            upload.synchronize().unwrap();
            assert!(upload.is_done().unwrap());
        }
    }
    let mut seen = vec![0u8; 12_345];
    kept.read(&compute, 0, &mut seen).unwrap();
    assert!(seen == noise(12_345, 3));
    // An empty blob and a part of one.
    let mut blob = arena.allocate::<u8>(Holding::Adapters, "blob", 5000).unwrap();
    uploader.upload(&mut blob, 5000, &[]).unwrap().synchronize().unwrap();
    uploader.upload(&mut blob, 0, &noise(5000, 8)).unwrap();
    uploader.upload(&mut blob, 1999, &noise(1001, 9)).unwrap();
    uploader.synchronize().unwrap();
    let mut seen = vec![0u8; 5000];
    blob.read(&compute, 0, &mut seen).unwrap();
    let mut expected = noise(5000, 8);
    expected[1999..3000].copy_from_slice(&noise(1001, 9));
    assert!(seen == expected);
    drop((uploader, blob, kept, arena, compute, context));
    StandIn::get().assert_nothing_held();
}

pub(crate) fn loader_threads_share_an_uploader() {
    let (context, compute) = open();
    let arena = Arena::reserve(&context, 1 << 20).unwrap();
    let uploader = Uploader::new(&compute, 2, 512).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (arena, uploader, compute) = (arena.clone(), &uploader, &compute);
            scope.spawn(move || {
                for round in 0..20 {
                    let bytes = noise(100 + 397 * round as usize, thread * 100 + round);
                    let mut blob = arena.allocate::<u8>(Holding::Adapters, "blob", bytes.len()).unwrap();
                    let upload = uploader.upload(&mut blob, 0, &bytes).unwrap();
                    upload.before(compute).unwrap();
                    let mut seen = vec![0; bytes.len()];
                    blob.read(compute, 0, &mut seen).unwrap();
                    assert!(seen == bytes, "thread {thread} round {round}");
                }
            });
        }
    });
    assert_eq!(arena.usage().held(Holding::Adapters), 0);
}

pub(crate) fn steps_follow_each_other() {
    let (context, stream) = open();
    let arena = Arena::reserve(&context, 1 << 20).unwrap();
    let mut layout = StepLayout::new();
    let header = layout.section::<i32>(16);
    let pointers = layout.section::<u64>(3);
    let scales = layout.section::<f32>(5);
    let rows = layout.section::<u32>(1000);
    assert_eq!(layout.bytes() % 16, 0);
    let mut block = StepBlock::new(&arena, layout).unwrap();
    assert_eq!(block.pointer(scales).address() - block.pointer(header).address(), 64 + 32);
    let mut copies = Vec::new();
    let mut fetched = Vec::new();
    // Steps are queued without waiting for any: every one must be sent as it was written.
    for step in 0..5u32 {
        let mut writer = block.begin().unwrap();
        writer.section(header).unwrap().fill(step as i32);
        writer.section(pointers).unwrap().fill(u64::from(step) << 40);
        writer.section(scales).unwrap().copy_from_slice(&[step as f32; 5]);
        writer.section(rows).unwrap().fill(step + 7);
        writer.send_used(&stream, rows, rows.len()).unwrap();
        let mut copy = arena.allocate::<u8>(Holding::Buffers, "copy", layout.bytes()).unwrap();
        copy.copy_from(&stream, 0, block.device(), 0..layout.bytes()).unwrap();
        let mut readback = Readback::<u8>::new(&context, layout.bytes()).unwrap();
        readback.fetch(&stream, &copy, 0, layout.bytes()).unwrap();
        copies.push(copy);
        fetched.push(readback);
    }
    for (step, readback) in (0..5u32).zip(&fetched) {
        let bytes = readback.wait().unwrap();
        let words: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        assert_eq!(words[..16], [step; 16]);
        assert_eq!(words[16..22], [0, step << 8, 0, step << 8, 0, step << 8]);
        assert_eq!(words[24..29], [(step as f32).to_bits(); 5]);
        assert_eq!(words[32..1032], [step + 7; 1000]);
    }
    // A part of a step: what lies behind it stays as it was.
    let mut writer = block.begin().unwrap();
    writer.section(header).unwrap().fill(-1);
    writer.section(rows).unwrap().fill(0);
    writer.send_used(&stream, header, header.len()).unwrap();
    let mut readback = Readback::<u8>::new(&context, layout.bytes()).unwrap();
    readback.fetch(&stream, block.device(), 0, layout.bytes()).unwrap();
    let bytes = readback.wait().unwrap();
    assert!(bytes[..64].iter().all(|byte| *byte == 0xFF));
    assert_eq!(bytes[4124..4128], 11u32.to_le_bytes());
}
