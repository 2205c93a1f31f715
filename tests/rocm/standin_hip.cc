// A libamdhip64 for tests: the functions that csrc/gpu/hip_driver.cc uses, on
// devices that are not there. It checks what HIP checks (devices, handles,
// code, symbols) and hands launches to a function of the test's. Built by
// conftest.py.

#include <elf.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

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

struct ErrorText {
  int code;
  const char* name;
  const char* text;
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

struct Module {
  int device;
  std::vector<char> code;
};

struct Function {
  const Module* module;
  std::string name;
};

struct Stream {
  int device;
};

using LaunchCallback = int (*)(int device, const void* code, size_t code_size,
                               const char* kernel, const unsigned* grid,
                               const unsigned* block, const void* args,
                               size_t args_size, void* stream);

std::mutex mutex;
int device_count = 8;
int compute_units = 256;
std::string arch = "gfx950:sramecc+:xnack-";
std::map<std::string, int> failures;
std::map<int, int> load_counts;
std::vector<std::unique_ptr<Module>> modules;
std::vector<std::unique_ptr<Function>> functions;
std::vector<std::unique_ptr<Stream>> streams;
std::atomic<LaunchCallback> launch_callback = nullptr;
thread_local int current_device = 0;

// The error that the test wants of a call.
int Wanted(const char* call) {
  const auto found = failures.find(call);
  return found == failures.end() ? kSuccess : found->second;
}

template <class T>
bool Owns(const std::vector<std::unique_ptr<T>>& all, const void* handle) {
  return std::any_of(all.begin(), all.end(),
                     [handle](const auto& x) { return x.get() == handle; });
}

// Bytes of an ELF file for AMD GPUs, 0 for anything else.
size_t CodeSize(const void* code) {
  Elf64_Ehdr header;
  std::memcpy(&header, code, sizeof(header));
  constexpr int kAmdGpu = 224;
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 ||
      header.e_machine != kAmdGpu) {
    return 0;
  }
  size_t size = header.e_shoff + size_t{header.e_shnum} * header.e_shentsize;
  for (int i = 0; i < header.e_shnum; ++i) {
    Elf64_Shdr section;
    std::memcpy(&section,
                static_cast<const char*>(code) + header.e_shoff +
                    size_t(i) * header.e_shentsize,
                sizeof(section));
    if (section.sh_type != SHT_NOBITS) {
      size = std::max<size_t>(size, section.sh_offset + section.sh_size);
    }
  }
  return size;
}

}  // namespace

// The test's side.

EXPORT void standin_set_devices(int count, const char* name, int units) {
  std::lock_guard<std::mutex> lock(mutex);
  device_count = count;
  arch = name;
  compute_units = units;
}

// Makes a function return an error; 0: work again.
EXPORT void standin_fail(const char* call, int error) {
  std::lock_guard<std::mutex> lock(mutex);
  failures[call] = error;
}

EXPORT void standin_set_launch(LaunchCallback callback) {
  launch_callback = callback;
}

// Modules loaded on a device so far.
EXPORT int standin_loads(int device) {
  std::lock_guard<std::mutex> lock(mutex);
  return load_counts[device];
}

// A stream of a device.
EXPORT void* standin_stream(int device) {
  std::lock_guard<std::mutex> lock(mutex);
  streams.push_back(std::make_unique<Stream>(Stream{device}));
  return streams.back().get();
}

// HIP's side.

EXPORT const char* hipGetErrorName(int error) {
  for (const ErrorText& entry : kErrors) {
    if (entry.code == error) return entry.name;
  }
  return "hipErrorUnknown";
}

EXPORT const char* hipGetErrorString(int error) {
  for (const ErrorText& entry : kErrors) {
    if (entry.code == error) return entry.text;
  }
  return "unknown error";
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
  const size_t size = CodeSize(code);
  if (size == 0) return kInvalidImage;
  const char* bytes = static_cast<const char*>(code);
  modules.push_back(std::make_unique<Module>(
      Module{current_device, std::vector<char>(bytes, bytes + size)}));
  ++load_counts[current_device];
  *module = modules.back().get();
  return kSuccess;
}

EXPORT int hipModuleGetFunction(void** function, void* module,
                                const char* name) {
  std::lock_guard<std::mutex> lock(mutex);
  if (int error = Wanted("hipModuleGetFunction")) return error;
  if (!Owns(modules, module)) return kInvalidHandle;
  const auto* from = static_cast<const Module*>(module);
  if (from->device != current_device) return kInvalidHandle;
  // The name with the zero that ends it, as in the table of names.
  const auto found = std::search(from->code.begin(), from->code.end(), name,
                                 name + std::strlen(name) + 1);
  if (found == from->code.end()) return kNotFound;
  functions.push_back(std::make_unique<Function>(Function{from, name}));
  *function = functions.back().get();
  return kSuccess;
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
                  *static_cast<const size_t*>(extra[3]), stream);
}
