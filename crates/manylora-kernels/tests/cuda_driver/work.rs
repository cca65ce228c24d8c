//! Work: launches, recorded steps and matrix products.

use std::panic::{AssertUnwindSafe, catch_unwind};

use half::{bf16, f16};
use manylora_kernels::cuda::arguments::{
    Argmax, BiasAdd, Convert, Embed, GatedActivation, GatherRows, HeaderField, Largest, LoraEmbed, LoraExpand,
    LoraShrink, PagedAttention, PagedAttentionReduce, RmsNorm, RmsNormGroups, RopeKvWrite,
};
use manylora_kernels::cuda::{
    AlgorithmChoice, Arena, CudaError, Device, DevicePointer, DeviceSlice, Event, GraphCache, Grid, Holding, Kernel,
    KernelArguments, Matmul, MatmulShape, OperandType, Recorder, Stream, Uploader,
};
use manylora_kernels::kernel_arguments;

use crate::stand_in::StandIn;

const WIDTH: usize = 24;
const ROWS: usize = 5;

/// What a launch of `gather_rows_f32` needs: `out[i] = input[index[i]]`.
pub(crate) struct Gather {
    kernel: Kernel<GatherRows>,
    header: DeviceSlice<i32>,
    index: DeviceSlice<u32>,
    pub(crate) input: DeviceSlice<f32>,
    pub(crate) out: DeviceSlice<f32>,
}

impl Gather {
    pub(crate) fn new(device: &Device, arena: &Arena) -> Result<Self, CudaError> {
        let stream = device.compute();
        let kernel: Kernel<GatherRows> = device.kernels().kernel("gather_rows_f32")?;
        kernel.allow_shared(64 << 10)?;
        let mut header = arena.allocate(Holding::Buffers, "header", HeaderField::COUNT)?;
        let mut counts = [0; HeaderField::COUNT];
        counts[HeaderField::Rows as usize] = ROWS as i32;
        counts[HeaderField::SampleRows as usize] = ROWS as i32;
        header.write(stream, 0, &counts)?;
        let mut index = arena.allocate(Holding::Buffers, "index", ROWS)?;
        index.write(stream, 0, &[4, 0, 3, 1, 2])?;
        let input = arena.allocate(Holding::Buffers, "input", ROWS * WIDTH)?;
        let mut out = arena.allocate(Holding::Buffers, "out", ROWS * WIDTH)?;
        out.fill_zero(stream)?;
        Ok(Self { kernel, header, index, input, out })
    }

    pub(crate) fn launch(&self, stream: &Stream) -> Result<(), CudaError> {
        let arguments = GatherRows {
            header: self.header.pointer(),
            row_index: self.index.pointer(),
            input: self.input.pointer(),
            input_stride: WIDTH as i32,
            width: WIDTH as i32,
            out: self.out.pointer(),
            out_stride: WIDTH as i32,
        };
        // SAFETY: all of it is as long as the kernel reads, and lives as long as `self`.
        #[expect(unsafe_code, reason = "launches a kernel")]
        unsafe {
            self.kernel.launch(stream, Grid::new(ROWS as u32, 1, 128), &arguments)
        }
    }

    pub(crate) fn fill(&mut self, stream: &Stream, seed: f32) -> Result<(), CudaError> {
        let values: Vec<f32> = (0..ROWS * WIDTH).map(|at| seed + at as f32).collect();
        self.input.write(stream, 0, &values)
    }

    pub(crate) fn check(&self, stream: &Stream, seed: f32) -> Result<(), CudaError> {
        let mut values = [0.0; ROWS * WIDTH];
        self.out.read(stream, 0, &mut values)?;
        for (row, from) in [4, 0, 3, 1, 2].into_iter().enumerate() {
            for column in 0..WIDTH {
                assert_eq!(values[row * WIDTH + column], seed + (from * WIDTH + column) as f32, "row {row}");
            }
        }
        Ok(())
    }
}

fn open() -> (Device, Arena) {
    let device = Device::open(0).unwrap();
    let arena = Arena::reserve(device.context(), 1 << 22).unwrap();
    (device, arena)
}

kernel_arguments! {
    /// One argument is too narrow.
    struct TooNarrow {
        header: DevicePointer<i32>,
        row_index: u32,
        input: DevicePointer<f32>,
        input_stride: i32,
        width: i32,
        out: DevicePointer<f32>,
        out_stride: i32,
    }

    /// One argument is missing.
    struct TooFew {
        header: DevicePointer<i32>,
        row_index: DevicePointer<u32>,
        input: DevicePointer<f32>,
    }
}

pub(crate) fn kernels_take_their_arguments() {
    let (device, arena) = open();
    let mut gather = Gather::new(&device, &arena).unwrap();
    gather.fill(device.compute(), 0.25).unwrap();
    gather.launch(device.compute()).unwrap();
    gather.check(device.compute(), 0.25).unwrap();
    let difference = |result: Result<(), CudaError>| match result {
        Err(CudaError::Parameters { kernel, difference }) => {
            assert_eq!(kernel, "gather_rows_f32");
            difference
        }
        other => panic!("{other:?}"),
    };
    let kernels = device.kernels();
    let narrow = difference(kernels.kernel::<TooNarrow>("gather_rows_f32").map(drop));
    assert!(narrow.contains("`row_index` has 4") && narrow.contains("parameter 2 has 8"), "{narrow}");
    let few = difference(kernels.kernel::<TooFew>("gather_rows_f32").map(drop));
    assert!(few.contains("7 parameters, 3"), "{few}");
    let unknown = kernels.kernel::<GatherRows>("no_such_kernel").unwrap_err();
    assert_eq!(unknown, CudaError::UnknownKernel { name: "no_such_kernel".to_owned() });
    assert!(kernels.kernel::<GatherRows>("zero\0byte").is_err());
    // A grid of nothing is nothing, not an error.
    let nothing = Grid::new(0, 1, 128);
    let arguments = TooFew { header: DevicePointer::NULL, row_index: DevicePointer::NULL, input: DevicePointer::NULL };
    assert_eq!(TooFew::PARAMETERS.len(), 3);
    let kernel = kernels.kernel::<GatherRows>("gather_rows_f32").unwrap();
    let most = device.context().properties().shared_memory as u32;
    kernel.allow_shared(most).unwrap();
    assert!(matches!(kernel.allow_shared(most + 1), Err(CudaError::Driver { call: "cuFuncSetAttribute", .. })));
    let list = GatherRows {
        header: arguments.header,
        row_index: arguments.row_index,
        input: arguments.input,
        input_stride: 0,
        width: 0,
        out: DevicePointer::NULL,
        out_stride: 0,
    };
    // SAFETY: no block runs.
    #[expect(unsafe_code, reason = "launches a kernel")]
    unsafe { kernel.launch(device.compute(), nothing, &list) }.unwrap();
}

/// Every kernel of the build is there and takes the list that is declared for it.
pub(crate) fn every_kernel_has_its_list() {
    let device = Device::open(0).unwrap();
    let kernels = device.kernels();
    let mut missing = Vec::new();
    let mut find = |name: &str, found: Result<(), CudaError>| match found {
        Ok(()) => {}
        Err(error) => missing.push(format!("{name}: {error}")),
    };
    macro_rules! lists {
        ($($list:ty => $($name:literal),+;)*) => {
            $($(find($name, kernels.kernel::<$list>($name).map(drop));)+)*
        };
    }
    lists! {
        LoraShrink<bf16> => "lora_shrink_bf16";
        LoraShrink<f16> => "lora_shrink_f16";
        LoraExpand => "lora_expand_bf16", "lora_expand_f16";
        LoraEmbed => "lora_embed_bf16", "lora_embed_f16";
        Embed<bf16> => "embed_bf16";
        Embed<f16> => "embed_f16";
        RmsNorm<bf16> => "rms_norm_bf16";
        RmsNorm<f16> => "rms_norm_f16";
        RmsNorm<f32> => "rms_norm_f32";
        RmsNormGroups => "rms_norm_groups_f32";
        RopeKvWrite<bf16> => "rope_kv_write_bf16";
        RopeKvWrite<f16> => "rope_kv_write_f16";
        PagedAttention<bf16> => "paged_attention_64_bf16", "paged_attention_128_bf16", "paged_attention_256_bf16";
        PagedAttention<f16> => "paged_attention_64_f16", "paged_attention_128_f16", "paged_attention_256_f16";
        PagedAttentionReduce<bf16> => "paged_attention_reduce_bf16";
        PagedAttentionReduce<f16> => "paged_attention_reduce_f16";
        GatedActivation<bf16> => "gated_activation_bf16";
        GatedActivation<f16> => "gated_activation_f16";
        BiasAdd => "bias_add_f32";
        Convert<bf16> => "convert_bf16";
        Convert<f16> => "convert_f16";
        GatherRows => "gather_rows_f32";
        Argmax => "argmax_f32";
        Largest => "largest_f32";
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

pub(crate) fn time_is_measured() {
    let (device, arena) = open();
    let compute = device.compute();
    let mut gather = Gather::new(&device, &arena).unwrap();
    gather.fill(compute, 1.0).unwrap();
    let (start, end) = (Event::timed(device.context()).unwrap(), Event::timed(device.context()).unwrap());
    compute.record(&start).unwrap();
    gather.launch(compute).unwrap();
    compute.record(&end).unwrap();
    end.synchronize().unwrap();
    let seconds = end.seconds_since(&start).unwrap();
    assert!(seconds > 0.0 && seconds < 100.0, "{seconds}");
    let plain = Event::new(device.context()).unwrap();
    compute.record(&plain).unwrap();
    plain.synchronize().unwrap();
    assert!(matches!(plain.seconds_since(&start), Err(CudaError::Driver { .. })));
}

pub(crate) fn recorded_steps_replay() {
    let (device, arena) = open();
    let compute = device.compute();
    let mut gather = Gather::new(&device, &arena).unwrap();
    let mut cache = GraphCache::<usize>::new(device.context()).unwrap();
    let stand_in = StandIn::get();
    stand_in.reset_counts();
    for round in 0..4 {
        let seed = round as f32 * 100.0;
        gather.fill(compute, seed).unwrap();
        gather.out.fill_zero(compute).unwrap();
        let graph = cache
            .get_or_record::<CudaError>(7, |stream| {
                assert_eq!(round, 0, "recorded again");
                gather.launch(stream)?;
                gather.launch(stream)
            })
            .unwrap();
        assert_eq!(graph.nodes(), 2);
        // SAFETY: what was recorded uses memory that lives on.
        #[expect(unsafe_code, reason = "replays a graph")]
        unsafe { graph.replay(compute) }.unwrap();
        gather.check(compute, seed).unwrap();
    }
    // The launches were given once, and run four times.
    assert_eq!((stand_in.calls("cuLaunchKernel"), stand_in.calls("cuGraphLaunch")), (2, 4));
    assert_eq!(stand_in.launches("gather_rows_f32"), 8);
    assert_eq!((cache.len(), cache.get(&8).is_none()), (1, true));
    cache.clear();
    assert!(cache.is_empty());
    drop((cache, gather, arena, device));
    stand_in.assert_nothing_held();
}

pub(crate) fn recording_always_ends() {
    let (device, arena) = open();
    let mut gather = Gather::new(&device, &arena).unwrap();
    let mut recorder = Recorder::new(device.context()).unwrap();
    // An error of the work itself comes out as it is.
    let mine = || CudaError::UnknownKernel { name: "mine".to_owned() };
    let failed = recorder.record(|stream| {
        gather.launch(stream)?;
        Err(mine())
    });
    assert_eq!(failed.unwrap_err(), mine());
    // A panic passes through.
    let panicked = catch_unwind(AssertUnwindSafe(|| recorder.record::<CudaError>(|_| panic!("in the middle"))));
    assert!(panicked.is_err());
    // What must not be done while recording is an error, whether the work hides it or not.
    assert!(recorder.record::<CudaError>(|stream| stream.synchronize()).is_err());
    let hidden = recorder.record::<CudaError>(|stream| {
        assert!(stream.synchronize().is_err());
        Ok(())
    });
    assert!(hidden.is_err());
    // Meanwhile other threads go on with the compute stream.
    let uploader = Uploader::new(device.compute(), 2, 256).unwrap();
    let mut blob = arena.allocate::<u8>(Holding::Adapters, "blob", 1000).unwrap();
    let mut graph = recorder
        .record::<CudaError>(|stream| {
            gather.launch(stream)?;
            std::thread::scope(|scope| scope.spawn(|| uploader.upload(&mut blob, 0, &[7; 1000])).join().unwrap())?;
            gather.launch(stream)
        })
        .unwrap();
    assert_eq!(graph.nodes(), 2);
    gather.fill(device.compute(), 3.0).unwrap();
    // SAFETY: what was recorded uses memory that lives on.
    #[expect(unsafe_code, reason = "replays a graph")]
    unsafe { graph.replay(device.compute()) }.unwrap();
    gather.check(device.compute(), 3.0).unwrap();
    let mut seen = [0; 1000];
    uploader.synchronize().unwrap();
    blob.read(device.compute(), 0, &mut seen).unwrap();
    assert_eq!(seen, [7; 1000]);
    drop((graph, recorder, uploader, blob, gather, arena, device));
    StandIn::get().assert_nothing_held();
}

/// Small values, so that half-width products are exact.
fn small(len: usize, seed: usize) -> Vec<f32> {
    (0..len).map(|at| ((at * 7 + seed * 5 + at / 3) % 13) as f32 * 0.25 - 1.5).collect()
}

pub(crate) fn products_are_right() {
    let (device, arena) = open();
    let compute = device.compute();
    for choice in [AlgorithmChoice::Fastest, AlgorithmChoice::OnePerWeight { rows: 16 }] {
        let mut matmul = Matmul::new(&arena, &[], 1 << 16, choice).unwrap();
        for (operands, rows, output, input, gap, add) in [
            (OperandType::Bf16, 1, 8, 16, 0, false),
            (OperandType::Bf16, 5, 24, 40, 8, true),
            (OperandType::F16, 16, 13, 8, 0, true),
            (OperandType::F16, 3, 64, 72, 16, false),
        ] {
            let shape = MatmulShape {
                x_stride: input + gap,
                out_stride: output + gap / 2,
                add,
                ..MatmulShape::dense(rows, output, input, operands)
            };
            let round = |value: f32| match operands {
                OperandType::Bf16 => (bf16::from_f32(value).to_bits(), bf16::from_f32(value).to_f64()),
                OperandType::F16 => (f16::from_f32(value).to_bits(), f16::from_f32(value).to_f64()),
            };
            let x = small(rows * shape.x_stride, 1);
            let weight = small(output * input, 2);
            let before = small(rows * shape.out_stride, 3);
            let bits = |values: &[f32]| values.iter().map(|value| round(*value).0).collect::<Vec<u16>>();
            let mut device_x = arena.allocate::<u16>(Holding::Buffers, "x", x.len()).unwrap();
            let mut device_weight = arena.allocate::<u16>(Holding::Weights, "weight", weight.len()).unwrap();
            let mut out = arena.allocate::<f32>(Holding::Buffers, "out", before.len()).unwrap();
            device_x.write(compute, 0, &bits(&x)).unwrap();
            device_weight.write(compute, 0, &bits(&weight)).unwrap();
            let mut expected = before.clone();
            for row in 0..rows {
                for column in 0..output {
                    let sum: f64 = (0..input)
                        .map(|at| round(x[row * shape.x_stride + at]).1 * round(weight[column * input + at]).1)
                        .sum();
                    let place = &mut expected[row * shape.out_stride + column];
                    *place = (sum + if add { f64::from(*place) } else { 0.0 }) as f32;
                }
            }
            let place = out.pointer();
            let mut run = |stream: &Stream| {
                // SAFETY: the matrices have this shape, and live to the end of the round.
                #[expect(unsafe_code, reason = "runs a product")]
                unsafe {
                    matmul.run(stream, shape, device_x.pointer().cast(), device_weight.pointer().cast(), place)
                }
            };
            out.write(compute, 0, &before).unwrap();
            run(compute).unwrap();
            let mut seen = vec![0.0f32; before.len()];
            out.read(compute, 0, &mut seen).unwrap();
            assert_eq!(seen, expected, "{shape:?}");
            // The same, recorded.
            let mut graph = Recorder::new(device.context()).unwrap().record(|stream| run(stream)).unwrap();
            out.write(compute, 0, &before).unwrap();
            // SAFETY: as above.
            #[expect(unsafe_code, reason = "replays a graph")]
            unsafe { graph.replay(compute) }.unwrap();
            out.read(compute, 0, &mut seen).unwrap();
            assert_eq!(seen, expected, "recorded {shape:?}");
        }
        // Each shape was looked up once; where one algorithm serves a weight, other numbers of rows are not.
        let lookups = || StandIn::counting().map(|device| device.calls("cublasLtMatmulAlgoGetHeuristic"));
        let before = lookups();
        matmul.prepare(MatmulShape::dense(7, 24, 40, OperandType::Bf16)).unwrap();
        matmul.prepare(MatmulShape::dense(7, 24, 40, OperandType::Bf16)).unwrap();
        let looked_up = u64::from(choice == AlgorithmChoice::Fastest);
        assert_eq!(lookups(), before.map(|before| before + looked_up));
    }
    drop((arena, device));
    StandIn::get().assert_nothing_held();
}

pub(crate) fn threads_bind_themselves() {
    let (device, arena) = open();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (device, arena) = (&device, arena.clone());
            scope.spawn(move || {
                let mut gather = Gather::new(device, &arena).unwrap();
                let stream = Stream::new(device.context()).unwrap();
                for round in 0..10 {
                    let seed = (thread * 1000 + round) as f32;
                    gather.fill(&stream, seed).unwrap();
                    gather.launch(&stream).unwrap();
                    gather.check(&stream, seed).unwrap();
                }
            });
        }
    });
    drop((arena, device));
    StandIn::get().assert_nothing_held();
}

/// Everything is dropped in one of many orders while work is under way.
pub(crate) fn any_order_of_dropping() {
    for order in 0..60usize {
        let (device, arena) = open();
        let mut gather = Gather::new(&device, &arena).unwrap();
        gather.fill(device.compute(), 1.0).unwrap();
        let stream = Stream::new(device.context()).unwrap();
        let uploader = Uploader::new(device.compute(), 2, 256).unwrap();
        let mut blob = arena.allocate::<u8>(Holding::Adapters, "blob", 1000).unwrap();
        let mut recorder = Recorder::new(device.context()).unwrap();
        let mut graph = recorder.record(|stream| gather.launch(stream)).unwrap();
        let upload = uploader.upload(&mut blob, 0, &[1; 1000]).unwrap();
        gather.launch(&stream).unwrap();
        // SAFETY: the arena goes only after all streams' work: dropping it waits.
        #[expect(unsafe_code, reason = "replays a graph")]
        unsafe { graph.replay(&stream) }.unwrap();
        let mut things: Vec<Option<Box<dyn std::any::Any>>> = vec![
            Some(Box::new(device)),
            Some(Box::new(arena)),
            Some(Box::new(gather)),
            Some(Box::new(stream)),
            Some(Box::new(uploader)),
            Some(Box::new(blob)),
            Some(Box::new(recorder)),
            Some(Box::new(graph)),
            Some(Box::new(upload)),
        ];
        // Steps that have no common divisor with 9 go through all; `order` turns and starts them differently.
        let step = [1, 2, 4, 5, 7, 8][order % 6];
        for at in 0..things.len() {
            let index = (order / 6 + at * step) % things.len();
            drop(things[index].take());
        }
        assert!(things.iter().all(Option::is_none));
        StandIn::get().assert_nothing_held();
    }
}

pub(crate) fn a_lost_context_says_so() {
    let (device, arena) = open();
    let mut gather = Gather::new(&device, &arena).unwrap();
    gather.fill(device.compute(), 1.0).unwrap();
    StandIn::get().fail("cuStreamSynchronize", 1, 719);
    let error = device.compute().synchronize().unwrap_err();
    assert!(error.is_fatal() && error.to_string().contains("start the process again"), "{error}");
    // A failure of a release is kept, and told once.
    assert_eq!(device.context().take_late_error(), None);
    StandIn::get().fail("cuEventDestroy_v2", 1, 999);
    drop(Event::new(device.context()).unwrap());
    assert!(matches!(device.context().take_late_error(), Some(CudaError::Driver { code: 999, .. })));
    assert_eq!(device.context().take_late_error(), None);
}
