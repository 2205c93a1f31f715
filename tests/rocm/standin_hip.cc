// A libamdhip64 for tests: the functions that csrc/gpu/hip_driver.cc uses, on
// devices that are not there. It checks what HIP checks (devices, handles,
// code, symbols) and hands launches to a function of the test's. Built by
// conftest.py.

#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "standin.h"

namespace {

enum : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kInvalidConfiguration = 9,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kNoBinaryForGpu = 209,
  kInvalidHandle = 400,
  kNotFound = 500,
  kLaunchFailure = 719,
};

constexpr ErrorText kErrors[] = {
    {kSuccess, "hipSuccess", "no error"},
    {kInvalidValue, "hipErrorInvalidValue", "invalid argument"},
    {kOutOfMemory, "hipErrorOutOfMemory", "out of memory"},
    {kInvalidConfiguration, "hipErrorInvalidConfiguration",
     "invalid configuration argument"},
    {kNoDevice, "hipErrorNoDevice", "no ROCm-capable device is detected"},
    {kInvalidDevice, "hipErrorInvalidDevice", "invalid device ordinal"},
    {kInvalidImage, "hipErrorInvalidImage", "device kernel image is invalid"},
    {kNoBinaryForGpu, "hipErrorNoBinaryForGpu",
     "no kernel image is available for execution on the device"},
    {kInvalidHandle, "hipErrorInvalidHandle", "invalid resource handle"},
    {kNotFound, "hipErrorNotFound", "named symbol not found"},
    {kLaunchFailure, "hipErrorLaunchFailure", "unspecified launch failure"},
};

constexpr uint16_t kAmdGpu = 224;
thread_local int current_device = 0;

}  // namespace

// HIP's side.

EXPORT const char* hipGetErrorName(int error) {
  const ErrorText* entry = Find(kErrors, error);
  return entry ? entry->name : "hipErrorUnknown";
}

EXPORT const char* hipGetErrorString(int error) {
  const ErrorText* entry = Find(kErrors, error);
  return entry ? entry->text : "unknown error";
}

EXPORT int hipGetDeviceCount(int* count) {
  std::lock_guard<std::mutex> lock(mutex);
  if (int error = Wanted("hipGetDeviceCount")) return error;
  *count = device_count;
  return device_count > 0 ? kSuccess : kNoDevice;
}

EXPORT int hipGetDevice(int* device) {
  std::lock_guard<std::mutex> lock(mutex);
  if (int error = Wanted("hipGetDevice")) return error;
  *device = current_device;
  return kSuccess;
}

EXPORT int hipSetDevice(int device) {
  std::lock_guard<std::mutex> lock(mutex);
  if (int error = Wanted("hipSetDevice")) return error;
  if (device < 0 || device >= device_count) return kInvalidDevice;
  current_device = device;
  return kSuccess;
}

EXPORT int hipGetDevicePropertiesR0600(void* properties, int device) {
  std::lock_guard<std::mutex> lock(mutex);
  if (int error = Wanted("hipGetDevicePropertiesR0600")) return error;
  if (device < 0 || device >= device_count) return kInvalidDevice;
  char* bytes = static_cast<char*>(properties);
  std::memset(bytes, 0, 1472);
  std::memcpy(bytes + 388, &compute_units, sizeof(compute_units));
  std::memcpy(bytes + 1160, arch.c_str(), arch.size() + 1);
  return kSuccess;
}

EXPORT int hipStreamGetDevice(void* stream, int* device) {
  std::lock_guard<std::mutex> lock(mutex);
  if (int error = Wanted("hipStreamGetDevice")) return error;
  if (stream != nullptr && !Owns(streams, stream)) return kInvalidHandle;
  *device = stream == nullptr ? current_device
                              : static_cast<const Stream*>(stream)->device;
  return kSuccess;
}

EXPORT int hipModuleLoadData(void** module, const void* code) {
  std::lock_guard<std::mutex> lock(mutex);
  if (int error = Wanted("hipModuleLoadData")) return error;
  *module = AddModule(current_device, code, kAmdGpu);
  return *module == nullptr ? kInvalidImage : kSuccess;
}

EXPORT int hipModuleGetFunction(void** function, void* module,
                                const char* name) {
  std::lock_guard<std::mutex> lock(mutex);
  if (int error = Wanted("hipModuleGetFunction")) return error;
  if (!Owns(modules, module)) return kInvalidHandle;
  const auto* from = static_cast<const Module*>(module);
  if (from->device != current_device) return kInvalidHandle;
  *function = AddFunction(from, name);
  return *function == nullptr ? kNotFound : kSuccess;
}

EXPORT int hipModuleLaunchKernel(void* handle, unsigned grid_x, unsigned grid_y,
                                 unsigned grid_z, unsigned block_x,
                                 unsigned block_y, unsigned block_z,
                                 unsigned dynamic_lds, void* stream,
                                 void** params, void** extra) {
  const Function* function = static_cast<const Function*>(handle);
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (int error = Wanted("hipModuleLaunchKernel")) return error;
    if (!Owns(functions, handle) ||
        function->module->device != current_device ||
        (stream != nullptr &&
         (!Owns(streams, stream) ||
          static_cast<const Stream*>(stream)->device != current_device))) {
      return kInvalidHandle;
    }
  }
  const unsigned grid[] = {grid_x, grid_y, grid_z};
  const unsigned block[] = {block_x, block_y, block_z};
  for (int i = 0; i < 3; ++i) {
    if (grid[i] == 0 || block[i] == 0 ||
        uint64_t{grid[i]} * block[i] >= uint64_t{1} << 32) {
      return kInvalidConfiguration;
    }
  }
  if (dynamic_lds != 0 || params != nullptr || extra == nullptr ||
      reinterpret_cast<intptr_t>(extra[0]) != 1 ||
      reinterpret_cast<intptr_t>(extra[2]) != 2 ||
      reinterpret_cast<intptr_t>(extra[4]) != 3) {
    return kInvalidValue;
  }
  const LaunchCallback callback = launch_callback;
  if (callback == nullptr) return kLaunchFailure;
  const std::vector<char>& code = function->module->code;
  return callback(current_device, code.data(), code.size(),
                  function->name.c_str(), grid, block, extra[1],
                  *static_cast<const size_t*>(extra[3]), stream, 0);
}
