// Stream capture, as the host sees it. Kernel files include <capture.h>; the emulator, which captures nothing, has its own.
#pragma once

#include <cuda_runtime.h>

namespace flash_wmma {

/// While there is one, this thread may do what a stream under capture in another mode does not survive, as allocating
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
