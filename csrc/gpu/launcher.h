// Launches kernels of the code objects built into the extension.

#ifndef ZYFA_GPU_LAUNCHER_H_
#define ZYFA_GPU_LAUNCHER_H_

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "csrc/gpu/code_object.h"
#include "csrc/gpu/driver.h"

namespace zyfa::gpu {

// One code object is loaded per device, at its first use; a failure is not
// remembered, since memory may be free the next time. Safe on any thread, and
// devices do not wait for one another.
class Launcher {
 public:
  using OpenDriver = MaybeError (*)(const Driver**);

  // `remedy` is what to do where no code object fits the device. `kernels` are
  // found as soon as their code is loaded; others at their first launch.
  Launcher(OpenDriver open_driver, const CodeObject* code_objects,
           size_t code_object_count, const char* remedy,
           std::vector<Launch> kernels = {})
      : open_driver_(open_driver),
        code_objects_(code_objects),
        code_object_count_(code_object_count),
        remedy_(remedy),
        kernels_(std::move(kernels)) {}

  MaybeError StreamDevice(void* stream, int* device) const;

  // Loads ahead, which a stream that is being captured may not allow.
  MaybeError Load(int device, Device* description = nullptr);

  // Enqueues on `stream`; null: the device's default stream.
  MaybeError Run(int device, const Launch& launch, void* stream);

 private:
  struct Loaded {
    std::mutex mutex;
    Device description;
    void* module = nullptr;
    std::map<std::string, void*> functions;
  };

  Loaded& At(int device);
  MaybeError LoadLocked(int device, const Driver& driver, Loaded& loaded) const;

  const OpenDriver open_driver_;
  const CodeObject* const code_objects_;
  const size_t code_object_count_;
  const char* const remedy_;
  const std::vector<Launch> kernels_;
  std::mutex mutex_;
  std::map<int, std::unique_ptr<Loaded>> devices_;
};

}  // namespace zyfa::gpu

#endif  // ZYFA_GPU_LAUNCHER_H_
