"""Many runs that answer one question: started, resumed and stopped (plan, runner), then compared with their uncertainty."""
