// Stream capture, in the emulator: there is none. The same interface as csrc/device/capture.h.
#pragma once

namespace flash_wmma {

class RelaxedCapture {
  public:
    RelaxedCapture() {}
};

}  // namespace flash_wmma
