//! One call of one function fails, each in turn: a clean error, no panic, no hang, nothing left behind.

use manylora_kernels::cuda::{
    AlgorithmChoice, Arena, CudaError, Device, GraphCache, Holding, Matmul, MatmulShape, OperandType, Readback,
    StepBlock, StepLayout, Uploader,
};

use crate::stand_in::sweep::sweep;
use crate::work::Gather;

/// A little of everything.
fn session() -> Result<(), CudaError> {
    let device = Device::open(0)?;
    let compute = device.compute();
    let arena = Arena::reserve(device.context(), 1 << 20)?;
    let adapters = arena.region(Holding::Adapters, "adapters", 1 << 16)?;
    let mut gather = Gather::new(&device, &arena)?;
    gather.fill(compute, 1.0)?;

    let uploader = Uploader::new(compute, 2, 300)?;
    let mut blob = adapters.allocate::<u8>(Holding::Adapters, "adapter", 1000)?;
    let upload = uploader.upload(&mut blob, 0, &[5; 1000])?;
    upload.before(compute)?;
    let mut seen = Readback::<u8>::new(device.context(), 1000)?;
    seen.fetch(compute, &blob, 0, 1000)?;
    assert_eq!(seen.wait()?, [5; 1000]);
    assert!(upload.is_done()?);
    let mut moved = adapters.allocate::<u8>(Holding::Adapters, "moved", 1000)?;
    moved.copy_from(compute, 0, &blob, 0..1000)?;

    let mut layout = StepLayout::new();
    let counts = layout.section::<i32>(16);
    let mut block = StepBlock::new(&arena, layout)?;
    for step in 0..3 {
        let mut writer = block.begin()?;
        writer.section(counts)?.fill(step);
        writer.send_used(compute, counts, counts.len())?;
    }

    let shape = MatmulShape::dense(2, 8, 8, OperandType::Bf16);
    let mut matmul = Matmul::new(&arena, &[], 4096, AlgorithmChoice::OnePerWeight { rows: 4 })?;
    let mut operands = arena.allocate::<u16>(Holding::Buffers, "operands", 128)?;
    operands.fill_zero(compute)?;
    let out = arena.allocate::<f32>(Holding::Buffers, "product", 16)?;
    let product = |matmul: &mut Matmul, stream: &_| {
        // SAFETY: both operands fit in 64 elements each, the result in 16.
        #[expect(unsafe_code, reason = "runs a product")]
        unsafe {
            matmul.run(stream, shape, operands.pointer().cast(), operands.pointer().add(64).cast(), out.pointer())
        }
    };
    product(&mut matmul, compute)?;

    let mut cache = GraphCache::<usize>::new(device.context())?;
    let graph = cache.get_or_record(2, |stream| {
        gather.launch(stream)?;
        product(&mut matmul, stream)
    })?;
    // SAFETY: the memory lives on.
    #[expect(unsafe_code, reason = "replays a graph")]
    unsafe { graph.replay(compute) }?;
    gather.check(compute, 1.0)?;
    device.context().synchronize()?;
    device.context().memory().map(drop)
}

pub(crate) fn every_call_may_fail() {
    // Codes that both libraries know: out of memory, and what is left when nothing else fits.
    let codes =
        |function: &str| -> &'static [i32] { if function.starts_with("cublas") { &[3, 14] } else { &[2, 999] } };
    let swept = sweep(session, |count| (1..=count).collect(), codes, |what, text| assert!(!text.is_empty(), "{what}"));
    assert!(swept.functions > 45 && swept.runs > 200, "{} {}", swept.functions, swept.runs);
    // Only releases, and what is tried for the sake of a release, may fail without anybody noticing.
    for name in &swept.unnoticed {
        assert!(
            ["cuCtxSetCurrent", "cuCtxSynchronize", "cuEventSynchronize", "cuStreamSynchronize", "cuStreamIsCapturing"]
                .contains(&name.as_str()),
            "failures of `{name}` go unnoticed"
        );
    }
}
