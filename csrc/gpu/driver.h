// What the launcher asks of a GPU's driver, so that the extension links to
// none: each implementation opens its library at run time.

#ifndef ZYFA_GPU_DRIVER_H_
#define ZYFA_GPU_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace zyfa::gpu {

enum class ErrorKind {
  kUnavailable,  // no driver library, no device, or no code for the device
  kOutOfMemory,
  kFailed,
};

struct Error {
  ErrorKind kind;
  std::string message;
};

// Nothing where all went well.
using MaybeError = std::optional<Error>;

struct Device {
  std::string arch;  // without features: "gfx950", "sm_90"
  int compute_units = 0;
};

// One launch along x. AMD's kernels take their arguments as one block of bytes;
// NVIDIA's one by one, since only their driver knows where each lies.
struct Launch {
  const char* kernel;
  uint32_t groups;
  uint32_t threads;  // of a group
  const void* args;
  size_t args_size;
  uint32_t shared_bytes = 0;    // of a group, beside what the kernel declares
  void** parameters = nullptr;  // in place of args
};

// Modules and functions are the driver's handles; they are never freed, since
// the process may end after its driver. All calls are safe on any thread and
// leave the thread's current device as it was.
class Driver {
 public:
  virtual ~Driver() = default;

  // Null is the thread's default stream.
  virtual MaybeError StreamDevice(void* stream, int* device) const = 0;

  virtual MaybeError Describe(int device, Device* description) const = 0;
  virtual MaybeError LoadModule(int device, const void* code,
                                void** module) const = 0;
  // The launch's kernel, made ready for its shared memory.
  virtual MaybeError GetFunction(int device, void* module, const Launch& launch,
                                 void** function) const = 0;

  // Enqueues on `stream`; null: the device's default stream.
  virtual MaybeError LaunchFunction(int device, void* function,
                                    const Launch& launch,
                                    void* stream) const = 0;
};

}  // namespace zyfa::gpu

#endif  // ZYFA_GPU_DRIVER_H_
