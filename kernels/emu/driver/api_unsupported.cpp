// Entry points of the driver API that this project's host code has no use for but its driver crate names. They answer
// that the device does not support them, so that a first use shows as an error and not as a missing symbol.
#include "calls.h"

namespace emu {

#define EMU_UNSUPPORTED(name) \
    EMU_API Status name() { return call(__func__, Needs::Initialization, [] { return not_supported; }); }

EMU_UNSUPPORTED(cuCtxCreate_v3)
EMU_UNSUPPORTED(cuCtxCreate_v4)
EMU_UNSUPPORTED(cuCtxDestroy_v2)
EMU_UNSUPPORTED(cuMemAllocManaged)
EMU_UNSUPPORTED(cuMemAdvise_v2)
EMU_UNSUPPORTED(cuMemPrefetchAsync_v2)
EMU_UNSUPPORTED(cuMemcpyPeerAsync)
EMU_UNSUPPORTED(cuMemHostGetDevicePointer_v2)
EMU_UNSUPPORTED(cuMemPoolCreate)
EMU_UNSUPPORTED(cuMemPoolDestroy)
EMU_UNSUPPORTED(cuImportExternalMemory)
EMU_UNSUPPORTED(cuDestroyExternalMemory)
EMU_UNSUPPORTED(cuExternalMemoryGetMappedBuffer)
EMU_UNSUPPORTED(cuStreamAttachMemAsync)
EMU_UNSUPPORTED(cuLaunchCooperativeKernel)
EMU_UNSUPPORTED(cuOccupancyAvailableDynamicSMemPerBlock)
EMU_UNSUPPORTED(cuOccupancyMaxActiveClusters)
EMU_UNSUPPORTED(cuOccupancyMaxPotentialBlockSize)
EMU_UNSUPPORTED(cuOccupancyMaxPotentialBlockSizeWithFlags)
EMU_UNSUPPORTED(cuOccupancyMaxPotentialClusterSize)

} // namespace emu
