// Stream capture, as the host sees it. Kernel files include <capture.h>; the emulator, which captures nothing, has its
// own.
#pragma once

#include <cuda_runtime.h>

namespace flash_wmma {

/// While one exists, this thread may make calls that would invalidate a capture in a stricter mode, such as allocating
/// memory.
class RelaxedCapture {
  public:
    RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    RelaxedCapture(const RelaxedCapture&) = delete;
    RelaxedCapture& operator=(const RelaxedCapture&) = delete;

  private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace flash_wmma
