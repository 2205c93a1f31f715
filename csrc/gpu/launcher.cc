#include "csrc/gpu/launcher.h"

namespace zyfa::gpu {

MaybeError Launcher::StreamDevice(void* stream, int* device) const {
  const Driver* driver;
  if (auto error = open_driver_(&driver)) return error;
  return driver->StreamDevice(stream, device);
}

MaybeError Launcher::Load(int device, Device* description) {
  const Driver* driver;
  if (auto error = open_driver_(&driver)) return error;
  Loaded& loaded = At(device);
  std::lock_guard<std::mutex> lock(loaded.mutex);
  if (auto error = LoadLocked(device, *driver, loaded)) return error;
  if (description != nullptr) *description = loaded.description;
  return std::nullopt;
}

MaybeError Launcher::Run(int device, const Launch& launch, void* stream) {
  const Driver* driver;
  if (auto error = open_driver_(&driver)) return error;
  Loaded& loaded = At(device);
  void* function = nullptr;
  {
    std::lock_guard<std::mutex> lock(loaded.mutex);
    if (auto error = LoadLocked(device, *driver, loaded)) return error;
    const auto found = loaded.functions.find(launch.kernel);
    if (found != loaded.functions.end()) {
      function = found->second;
    } else {
      if (auto error =
              driver->GetFunction(device, loaded.module, launch, &function)) {
        return error;
      }
      loaded.functions.emplace(launch.kernel, function);
    }
  }
  return driver->LaunchFunction(device, function, launch, stream);
}

Launcher::Loaded& Launcher::At(int device) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& loaded = devices_[device];
  if (loaded == nullptr) loaded = std::make_unique<Loaded>();
  return *loaded;
}

MaybeError Launcher::LoadLocked(int device, const Driver& driver,
                                Loaded& loaded) const {
  if (loaded.module != nullptr) return std::nullopt;
  Device description;
  if (auto error = driver.Describe(device, &description)) return error;
  std::string built;
  for (size_t i = 0; i < code_object_count_; ++i) {
    const CodeObject& code = code_objects_[i];
    if (description.arch == code.arch) {
      void* module = nullptr;
      if (auto error = driver.LoadModule(device, code.data, &module)) {
        return error;
      }
      std::map<std::string, void*> functions;
      for (const Launch& kernel : kernels_) {
        void*& function = functions[kernel.kernel];
        if (auto error =
                driver.GetFunction(device, module, kernel, &function)) {
          return error;
        }
      }
      loaded.description = description;
      loaded.module = module;
      loaded.functions = std::move(functions);
      return std::nullopt;
    }
    built += std::string(built.empty() ? "" : ", ") + code.arch;
  }
  return Error{ErrorKind::kUnavailable,
               "device " + std::to_string(device) + " is " + description.arch +
                   ", and this build holds kernels for " +
                   (built.empty() ? "none" : built) + ". " + remedy_};
}

}  // namespace zyfa::gpu
