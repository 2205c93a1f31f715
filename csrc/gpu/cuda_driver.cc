#include "csrc/gpu/cuda_driver.h"

#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <string>

namespace zyfa::gpu {
namespace {

// The part of CUDA's driver interface used here, declared as in cuda.h of CUDA
// 12 and 13, so that building needs no CUDA.
using CudaError = int;
constexpr CudaError kCudaSuccess = 0;
constexpr CudaError kCudaOutOfMemory = 2;
constexpr CudaError kCudaNoDevice = 100;
constexpr int kMultiprocessorCount = 16;
constexpr int kCapabilityMajor = 75;
constexpr int kCapabilityMinor = 76;
constexpr int kMaxDynamicSharedBytes = 8;

struct CudaFunctions {
  CudaError (*cuGetErrorName)(CudaError, const char**);
  CudaError (*cuGetErrorString)(CudaError, const char**);
  CudaError (*cuInit)(unsigned);
  CudaError (*cuDeviceGetCount)(int*);
  CudaError (*cuDeviceGetAttribute)(int*, int, int);
  CudaError (*cuDevicePrimaryCtxRetain)(void**, int);
  CudaError (*cuCtxPushCurrent_v2)(void*);
  CudaError (*cuCtxPopCurrent_v2)(void**);
  CudaError (*cuCtxGetDevice)(int*);
  CudaError (*cuStreamGetCtx)(void*, void**);
  CudaError (*cuModuleLoadData)(void**, const void*);
  CudaError (*cuModuleGetFunction)(void**, void*, const char*);
  CudaError (*cuFuncSetAttribute)(void*, int, int);
  CudaError (*cuLaunchKernel)(void*, unsigned, unsigned, unsigned, unsigned,
                              unsigned, unsigned, unsigned, void*, void**,
                              void**);
  CudaError (*cuTensorMapEncodeTiled)(void*, int, uint32_t, void*,
                                      const uint64_t*, const uint64_t*,
                                      const uint32_t*, const uint32_t*, int,
                                      int, int, int);
};

class CudaDriver final : public Driver {
 public:
  explicit CudaDriver(const CudaFunctions& functions) : cuda_(functions) {}

  MaybeError StreamDevice(void* stream, int* device) const override {
    void* context = nullptr;
    if (auto error =
            Check("cuStreamGetCtx", cuda_.cuStreamGetCtx(stream, &context))) {
      return error;
    }
    CurrentContext current(*this, context);
    if (current.error()) return current.error();
    return Check("cuCtxGetDevice", cuda_.cuCtxGetDevice(device));
  }

  MaybeError Describe(int device, Device* description) const override {
    int count = 0;
    CudaError status = cuda_.cuInit(0);
    if (status == kCudaSuccess) status = cuda_.cuDeviceGetCount(&count);
    if (status == kCudaNoDevice || (status == kCudaSuccess && count == 0)) {
      return Error{ErrorKind::kUnavailable,
                   "cuInit: " + Text(kCudaNoDevice) +
                       ". See that nvidia-smi lists the GPU, and that "
                       "CUDA_VISIBLE_DEVICES does not hide it"};
    }
    if (auto error = Check("cuInit", status)) return error;
    int major = 0, minor = 0;
    const auto ask = [this, device](int attribute, int* value) {
      return Check("cuDeviceGetAttribute",
                   cuda_.cuDeviceGetAttribute(value, attribute, device),
                   device);
    };
    if (auto error = ask(kCapabilityMajor, &major)) return error;
    if (auto error = ask(kCapabilityMinor, &minor)) return error;
    if (auto error = ask(kMultiprocessorCount, &description->compute_units)) {
      return error;
    }
    description->arch = "sm_" + std::to_string(10 * major + minor);
    return std::nullopt;
  }

  MaybeError LoadModule(int device, const void* code,
                        void** module) const override {
    CurrentContext current(*this, device);
    if (current.error()) return current.error();
    return Check("cuModuleLoadData", cuda_.cuModuleLoadData(module, code),
                 device);
  }

  MaybeError GetFunction(int device, void* module, const Launch& launch,
                         void** function) const override {
    CurrentContext current(*this, device);
    if (current.error()) return current.error();
    if (auto error = Check(
            (std::string("cuModuleGetFunction of ") + launch.kernel).c_str(),
            cuda_.cuModuleGetFunction(function, module, launch.kernel),
            device)) {
      return error;
    }
    return Check(
        (std::string("cuFuncSetAttribute of ") + launch.kernel).c_str(),
        cuda_.cuFuncSetAttribute(*function, kMaxDynamicSharedBytes,
                                 static_cast<int>(launch.shared_bytes)),
        device);
  }

  MaybeError LaunchFunction(int device, void* function, const Launch& launch,
                            void* stream) const override {
    CurrentContext current(*this, device);
    if (current.error()) return current.error();
    return Check((std::string("cuLaunchKernel of ") + launch.kernel).c_str(),
                 cuda_.cuLaunchKernel(function, launch.groups, 1, 1,
                                      launch.threads, 1, 1, launch.shared_bytes,
                                      stream, launch.parameters, nullptr),
                 device);
  }

  MaybeError Encode(const cuda::TensorMapPlan& plan, const void* base,
                    cuda::TensorMap* map) const {
    constexpr int kRank = cuda::TensorMapPlan::kRank;
    const uint32_t every[kRank] = {1, 1, 1, 1, 1};
    const int type = plan.type == cuda::MapType::kU8     ? 0
                     : plan.type == cuda::MapType::kBF16 ? 9
                                                         : 6;
    const int swizzle = plan.swizzle == cuda::MapSwizzle::k64B ? 2 : 3;
    constexpr int kNoInterleave = 0, kPromote256 = 3, kFillZeros = 0;
    return Check(
        "cuTensorMapEncodeTiled",
        cuda_.cuTensorMapEncodeTiled(
            map, type, kRank, const_cast<void*>(base), plan.sizes, plan.strides,
            plan.box, every, kNoInterleave, swizzle, kPromote256, kFillZeros));
  }

 private:
  // Makes a context, or a device's primary one as JAX uses it, the thread's
  // current one for as long as it lives.
  class CurrentContext {
   public:
    CurrentContext(const CudaDriver& driver, void* context) : driver_(driver) {
      Push(context);
    }
    CurrentContext(const CudaDriver& driver, int device) : driver_(driver) {
      void* context = nullptr;
      error_ = driver.PrimaryContext(device, &context);
      if (!error_) Push(context);
    }
    ~CurrentContext() {
      void* context;
      if (pushed_) (void)driver_.cuda_.cuCtxPopCurrent_v2(&context);
    }
    CurrentContext(const CurrentContext&) = delete;
    CurrentContext& operator=(const CurrentContext&) = delete;

    const MaybeError& error() const { return error_; }

   private:
    void Push(void* context) {
      error_ = driver_.Check("cuCtxPushCurrent",
                             driver_.cuda_.cuCtxPushCurrent_v2(context));
      pushed_ = !error_;
    }

    const CudaDriver& driver_;
    MaybeError error_;
    bool pushed_ = false;
  };

  // Retained once, and never released.
  MaybeError PrimaryContext(int device, void** context) const {
    std::lock_guard<std::mutex> lock(mutex_);
    void*& known = contexts_[device];
    if (known == nullptr) {
      if (auto error =
              Check("cuDevicePrimaryCtxRetain",
                    cuda_.cuDevicePrimaryCtxRetain(&known, device), device)) {
        known = nullptr;
        return error;
      }
    }
    *context = known;
    return std::nullopt;
  }

  std::string Text(CudaError status) const {
    const char* text = nullptr;
    const char* name = nullptr;
    (void)cuda_.cuGetErrorString(status, &text);
    (void)cuda_.cuGetErrorName(status, &name);
    return std::string(text ? text : "unknown error") + " (" +
           (name ? name : "error") + ", " + std::to_string(status) + ")";
  }

  MaybeError Check(const char* call, CudaError status, int device = -1) const {
    if (status == kCudaSuccess) return std::nullopt;
    std::string message = std::string(call) + ": " + Text(status);
    if (device >= 0) message += " on device " + std::to_string(device);
    return Error{status == kCudaOutOfMemory ? ErrorKind::kOutOfMemory
                                            : ErrorKind::kFailed,
                 message};
  }

  const CudaFunctions cuda_;
  mutable std::mutex mutex_;
  mutable std::map<int, void*> contexts_;
};

template <class Function>
void Find(void* library, const char* name, Function** function,
          std::string* missing) {
  *function = reinterpret_cast<Function*>(dlsym(library, name));
  if (*function == nullptr) *missing += std::string(" ") + name;
}

// Every function there is a symbol of.
std::string FindAll(void* library, CudaFunctions* cuda) {
  std::string missing;
#define ZYFA_FIND(name) Find(library, #name, &cuda->name, &missing)
  ZYFA_FIND(cuGetErrorName);
  ZYFA_FIND(cuGetErrorString);
  ZYFA_FIND(cuInit);
  ZYFA_FIND(cuDeviceGetCount);
  ZYFA_FIND(cuDeviceGetAttribute);
  ZYFA_FIND(cuDevicePrimaryCtxRetain);
  ZYFA_FIND(cuCtxPushCurrent_v2);
  ZYFA_FIND(cuCtxPopCurrent_v2);
  ZYFA_FIND(cuCtxGetDevice);
  ZYFA_FIND(cuStreamGetCtx);
  ZYFA_FIND(cuModuleLoadData);
  ZYFA_FIND(cuModuleGetFunction);
  ZYFA_FIND(cuFuncSetAttribute);
  ZYFA_FIND(cuLaunchKernel);
  ZYFA_FIND(cuTensorMapEncodeTiled);
#undef ZYFA_FIND
  return missing;
}

MaybeError Open(const CudaDriver** driver) {
  static auto* const mutex = new std::mutex;
  static const CudaDriver* opened = nullptr;
  std::lock_guard<std::mutex> lock(*mutex);
  if (opened == nullptr) {
    const char* named = std::getenv("ZYFA_JAX_CUDA_LIBRARY");
    const char* name =
        named != nullptr && *named != '\0' ? named : "libcuda.so.1";
    void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char* text = dlerror();
      return Error{ErrorKind::kUnavailable,
                   std::string("CUDA's library libcuda is not here (") +
                       (text != nullptr ? text : name) +
                       "). Install NVIDIA's driver, or name the library in "
                       "ZYFA_JAX_CUDA_LIBRARY"};
    }
    CudaFunctions functions;
    const std::string missing = FindAll(library, &functions);
    if (!missing.empty()) {
      dlclose(library);
      return Error{ErrorKind::kUnavailable,
                   "CUDA's library lacks" + missing +
                       ". zyfa_jax takes a driver for CUDA 12 or later"};
    }
    opened = new CudaDriver(functions);
  }
  *driver = opened;
  return std::nullopt;
}

}  // namespace

MaybeError OpenCuda(const Driver** driver) {
  const CudaDriver* opened;
  if (auto error = Open(&opened)) return error;
  *driver = opened;
  return std::nullopt;
}

MaybeError EncodeTensorMap(const cuda::TensorMapPlan& plan, const void* base,
                           cuda::TensorMap* map) {
  const CudaDriver* opened;
  if (auto error = Open(&opened)) return error;
  return opened->Encode(plan, base, map);
}

}  // namespace zyfa::gpu
